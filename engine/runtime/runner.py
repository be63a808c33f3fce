"""The model runner: from scheduled rows to logits. It only delegates: adapters, attention and model
own their work.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.device import Device
from engine.layers.step import Step
from engine.lora.adapter import Part
from engine.lora.manager import LoRAManager
from engine.models.decoder import DecoderModel
from engine.runtime.attention import RowContext, StepAttention, new_slots
from engine.runtime.decode_graphs import DecodeGraphRunner
from engine.runtime.decode_inputs import DecodeRow
from engine.runtime.prompt_logprobs import prompt_logprobs
from engine.runtime.request import ScheduledRow
from engine.runtime.sampler import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RunOutput:
    """What a step gives, for its rows in their order.

    `logits` [N, vocab] of the rows that sample. `finite` bool [rows] on the device: whether all
    hidden states of the row's tokens are finite numbers. `prompt_logprobs`: for rows that ask for
    them, one entry for each prompt token after those that the step computed. `replayed`: decode
    graphs ran the step.
    """

    logits: torch.Tensor
    finite: torch.Tensor
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    replayed: bool = False


class ModelRunner:
    """Runs one forward pass at a time."""

    def __init__(
        self,
        model: DecoderModel,
        attention: StepAttention,
        graphs: DecodeGraphRunner,
        lora_manager: LoRAManager,
        device: Device,
    ) -> None:
        self.model = model
        self.attention = attention
        self.graphs = graphs
        self.lora_manager = lora_manager
        self.device = device.torch_device

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRow]) -> RunOutput:
        """Compute the rows."""
        hidden = self._replayed(rows)
        replayed = hidden is not None
        if hidden is None:
            hidden = self.model.forward(self._step(rows), self.attention)
        stops = list(itertools.accumulate(row.num_new for row in rows))
        spans = [slice(stop - row.num_new, stop) for row, stop in zip(rows, stops, strict=True)]
        sampling = [index for index, row in enumerate(rows) if row.samples]
        last = [stops[index] - 1 for index in sampling]
        chosen = hidden
        if len(last) < len(hidden):  # an index from the host would wait for the device
            chosen = hidden[torch.tensor(last, dtype=torch.int64).to(self.device)]
        return RunOutput(
            self._logits(chosen, [rows[index] for index in sampling]),
            self._finite(hidden, rows),
            tuple(
                self._prompt_logprobs(row, hidden[span])
                for row, span in zip(rows, spans, strict=True)
            ),
            replayed,
        )

    @torch.inference_mode()
    def run_ahead(self, rows: Sequence[ScheduledRow], token_ids: torch.Tensor) -> RunOutput | None:
        """The step after the one of decoding `rows` that is under way, whose tokens `token_ids`
        int64 [rows] are known on the device alone; None if no graph can run it.
        """
        hidden = self._replayed(rows, token_ids)
        if hidden is None:
            return None
        nothing = ((),) * len(rows)
        return RunOutput(self._logits(hidden, rows), self._finite(hidden, rows), nothing, True)

    def _replayed(
        self, rows: Sequence[ScheduledRow], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Hidden states of a step of decoding rows by a graph; None if none can run it."""
        if len(rows) > self.graphs.max_rows or any(row.num_new > 1 for row in rows):
            return None
        adapters = [row.request.adapters for row in rows]
        ahead = int(token_ids is not None)
        contexts = [RowContext(r.request.pages, r.request.num_computed + ahead, 1) for r in rows]
        slots = new_slots(contexts, self.attention.page_size).tolist()
        inputs = [
            DecodeRow(0 if ahead else _token_ids(row)[0], own.num_computed, slot, own.pages)
            for row, own, slot in zip(rows, contexts, slots, strict=True)
        ]
        embedding_lora = self.lora_manager.bind(Part.embedding, [(uses, 1) for uses in adapters])
        uses = self.lora_manager.graph_uses(adapters)
        return self.graphs.run(inputs, uses, embedding_lora, token_ids)

    def _finite(self, hidden: torch.Tensor, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        finite = hidden.sum(-1).isfinite()
        if len(finite) == len(rows):
            return finite
        counts = torch.tensor([row.num_new for row in rows])
        owners = torch.arange(len(rows)).repeat_interleave(counts).to(self.device)
        faults = torch.zeros(len(rows), dtype=torch.int32, device=self.device)
        return faults.index_add_(0, owners, (~finite).int()) == 0

    def _logits(self, hidden: torch.Tensor, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        """One row of hidden states for each of `rows`."""
        uses = [(row.request.adapters, 1) for row in rows]
        return self.model.logits(hidden, self.lora_manager.bind(Part.head, uses))

    def _prompt_logprobs(
        self, row: ScheduledRow, hidden: torch.Tensor
    ) -> tuple[TokenLogprobs, ...]:
        """`hidden`: those of the row's new tokens."""
        if row.request.params.prompt_logprobs is None:
            return ()

        def logits(part: torch.Tensor) -> torch.Tensor:
            uses = [(row.request.adapters, len(part))]
            return self.model.logits(part, self.lora_manager.bind(Part.head, uses))

        return prompt_logprobs(row, hidden, logits)

    def _step(self, rows: Sequence[ScheduledRow]) -> Step:
        token_ids: list[int] = []
        positions: list[int] = []
        for row in rows:
            token_ids += _token_ids(row)
            num_computed = row.request.num_computed
            positions += range(num_computed, num_computed + row.num_new)
        uses = [(row.request.adapters, row.num_new) for row in rows]
        return Step(
            torch.tensor(token_ids, device=self.device),
            torch.tensor(positions, device=self.device),
            self.attention.prepare([_context(row) for row in rows]),
            self.lora_manager.bind(Part.layers, uses),
            self.lora_manager.bind(Part.embedding, uses),
        )


def _token_ids(row: ScheduledRow) -> list[int]:
    """The row's new tokens."""
    return row.request.token_slice(row.request.num_computed, row.num_new)


def _context(row: ScheduledRow) -> RowContext:
    return RowContext(row.request.pages, row.request.num_computed, row.num_new)
