"""What one step gave each of its rows: a token, log-probabilities of prompt tokens, or a fault that
ends this row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.runtime.request import ScheduledRow
from engine.runtime.runner import RunOutput
from engine.runtime.sampler import Sampler, TokenLogprobs
from engine.serving.group import Sample

NOTHING_LEFT = (
    "no token is left to choose from: logit_bias, bad_words, penalties and the grammar together "
    "rule out all; loosen them"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`token_id` if the row sampled; `fault` says why the row's numbers cannot be used."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    fault: str = ""


def outcomes(
    run: RunOutput, rows: Sequence[ScheduledRow], samples: Sequence[Sample], sampler: Sampler
) -> list[Outcome]:
    """Outcomes of `rows`, which belong to `samples`; those that sample get their tokens here."""
    drawn = iter(
        _draw(
            run.logits,
            [sample for row, sample in zip(rows, samples, strict=True) if row.samples],
            sampler,
        )
    )
    found = []
    for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        outcome = next(drawn) if row.samples else Outcome()
        fault = outcome.fault if run.finite[index] else _out_of_range(sample)
        found.append(replace(outcome, prompt_logprobs=run.prompt_logprobs[index], fault=fault))
    return found


def _draw(logits: torch.Tensor, samples: Sequence[Sample], sampler: Sampler) -> list[Outcome]:
    """A token for each sample from its row of logits [N, V]."""
    if not samples:
        return []
    output = sampler.sample(logits, [sample.row for sample in samples])
    table = torch.stack([output.token_ids, output.finite.long(), output.open.long()]).tolist()
    found = []
    for sample, logprobs, token_id, finite, is_open in zip(
        samples, output.logprobs, *table, strict=True
    ):
        fault = "" if finite else _out_of_range(sample)
        fault = fault or sample.grammar_error or ("" if is_open else NOTHING_LEFT)
        found.append(Outcome(token_id, logprobs, fault=fault))
    return found


def _out_of_range(sample: Sample) -> str:
    adapter = sample.group.adapter
    if adapter is None:
        return "the base model's numbers went out of range (inf or nan); use a wider model.dtype"
    name = repr(adapter) if isinstance(adapter, str) else ", ".join(map(repr, adapter))
    return (
        f"numbers went out of range (inf or nan) with adapter {name}; check its weights and its "
        "weight in the request, or use a wider model.dtype"
    )
