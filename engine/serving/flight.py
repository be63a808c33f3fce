"""A step under way: computed on the device while the host does other things, until it lands and
each of its rows has a token, log-probabilities of prompt tokens, or a fault that ends it alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.runtime.request import ScheduledRow
from engine.runtime.runner import RunOutput
from engine.runtime.sampler import SampleOutput, Sampler, TokenLogprobs
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


class Flight:
    """`rows` of a step, which belong to `samples`; those that sample draw their tokens here.

    `follows`: the step was begun before the tokens of the one before it were known; each row's
    token comes one position later than its sample knows.
    """

    def __init__(
        self,
        run: RunOutput,
        rows: Sequence[ScheduledRow],
        samples: Sequence[Sample],
        sampler: Sampler,
        *,
        follows: bool = False,
    ) -> None:
        self.rows = rows
        self.samples = samples
        self._run = run
        self._drawing = [own for row, own in zip(rows, samples, strict=True) if row.samples]
        self._sampled: SampleOutput | None = None
        parts = [run.finite]
        if self._drawing:
            sampling = [own.row for own in self._drawing]
            if follows:
                sampling = [replace(own, position=own.position + 1) for own in sampling]
            self._sampled = sampler.sample(run.logits, sampling)
            parts += [self._sampled.token_ids, self._sampled.finite, self._sampled.open]
        self._table = _Copy(torch.cat([part.to(torch.int64) for part in parts]))

    @property
    def token_ids(self) -> torch.Tensor | None:
        """Each row's token, int64 [rows] on the device, if a step of the same rows can follow
        before they are known.
        """
        simple = self._run.replayed and all(own.can_run_ahead for own in self.samples)
        return self._sampled.token_ids if simple and self._sampled is not None else None

    def land(self) -> list[Outcome]:
        """Wait for the step; outcomes of its rows."""
        table = self._table.values()
        finite, rest = table[: len(self.rows)], table[len(self.rows) :]
        drawn = iter(self._outcomes(rest))
        found = []
        for index, (row, sample) in enumerate(zip(self.rows, self.samples, strict=True)):
            outcome = next(drawn) if row.samples else Outcome()
            fault = outcome.fault if finite[index] else _out_of_range(sample)
            prompt_logprobs = self._run.prompt_logprobs[index]
            found.append(replace(outcome, prompt_logprobs=prompt_logprobs, fault=fault))
        return found

    def _outcomes(self, table: Sequence[int]) -> list[Outcome]:
        """Of the samples that draw: token ids, whether their logits are finite, whether any token
        was open to them.
        """
        count, found = len(self._drawing), []
        if self._sampled is None:
            return []
        columns = table[:count], table[count : 2 * count], table[2 * count :]
        for sample, logprobs, token_id, finite, is_open in zip(
            self._drawing, self._sampled.logprobs, *columns, strict=True
        ):
            fault = "" if finite else _out_of_range(sample)
            fault = fault or sample.grammar_error or ("" if is_open else NOTHING_LEFT)
            found.append(Outcome(token_id, logprobs, fault=fault))
        return found


class _Copy:
    """A copy of int64 [n] to the host, which is waited for when it is looked at."""

    def __init__(self, source: torch.Tensor) -> None:
        self._event: Any = None
        self._host = source
        if source.device.type == "cuda":
            self._host = torch.empty_like(source, device="cpu", pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.current_stream(source.device).record_event()

    def values(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers


def _out_of_range(sample: Sample) -> str:
    adapter = sample.group.adapter
    if adapter is None:
        return "the base model's numbers went out of range (inf or nan); use a wider model.dtype"
    name = repr(adapter) if isinstance(adapter, str) else ", ".join(map(repr, adapter))
    return (
        f"numbers went out of range (inf or nan) with adapter {name}; check its weights and its "
        "weight in the request, or use a wider model.dtype"
    )
