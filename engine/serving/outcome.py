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
    drawing = [sample for row, sample in zip(rows, samples, strict=True) if row.samples]
    tokens, finite = _draw(run, drawing, sampler)
    drawn = iter(tokens)
    found = []
    for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        outcome = next(drawn) if row.samples else Outcome()
        fault = outcome.fault if finite[index] else _out_of_range(sample)
        found.append(replace(outcome, prompt_logprobs=run.prompt_logprobs[index], fault=fault))
    return found


def _draw(
    run: RunOutput, samples: Sequence[Sample], sampler: Sampler
) -> tuple[list[Outcome], list[int]]:
    """A token for each sample from its row of logits, and which rows of the step are finite: all
    come from the device in one copy.
    """
    if not samples:
        return [], run.finite.tolist()
    output = sampler.sample(run.logits, [sample.row for sample in samples])
    parts = (output.token_ids, output.finite, output.open, run.finite)
    table = torch.cat([part.to(torch.int64) for part in parts]).tolist()
    count = len(samples)
    columns = table[:count], table[count : 2 * count], table[2 * count : 3 * count]
    found = []
    for sample, logprobs, token_id, finite, is_open in zip(
        samples, output.logprobs, *columns, strict=True
    ):
        fault = "" if finite else _out_of_range(sample)
        fault = fault or sample.grammar_error or ("" if is_open else NOTHING_LEFT)
        found.append(Outcome(token_id, logprobs, fault=fault))
    return found, table[3 * count :]


def _out_of_range(sample: Sample) -> str:
    adapter = sample.group.adapter
    if adapter is None:
        return "the base model's numbers went out of range (inf or nan); use a wider model.dtype"
    name = repr(adapter) if isinstance(adapter, str) else ", ".join(map(repr, adapter))
    return (
        f"numbers went out of range (inf or nan) with adapter {name}; check its weights and its "
        "weight in the request, or use a wider model.dtype"
    )
