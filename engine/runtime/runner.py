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
from engine.runtime.attention import RowContext, StepAttention
from engine.runtime.prompt_logprobs import prompt_logprobs
from engine.runtime.request import ScheduledRow
from engine.runtime.sampler import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RunOutput:
    """What a step gives, for its rows in their order.

    `logits` [N, vocab] of the rows that sample. `finite`: whether all hidden states of the row's
    tokens are finite numbers. `prompt_logprobs`: for rows that ask for them, one entry for each
    prompt token after those that the step computed.
    """

    logits: torch.Tensor
    finite: tuple[bool, ...]
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...]


class ModelRunner:
    """Runs one forward pass at a time."""

    def __init__(
        self,
        model: DecoderModel,
        attention: StepAttention,
        lora_manager: LoRAManager,
        device: Device,
    ) -> None:
        self.model = model
        self.attention = attention
        self.lora_manager = lora_manager
        self.device = device.torch_device

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRow]) -> RunOutput:
        """Compute the rows."""
        hidden = self.model.forward(self._step(rows), self.attention)
        finite = hidden.sum(-1).isfinite().tolist()
        stops = list(itertools.accumulate(row.num_new for row in rows))
        spans = [slice(stop - row.num_new, stop) for row, stop in zip(rows, stops, strict=True)]
        sampling = [index for index, row in enumerate(rows) if row.samples]
        last = torch.tensor([stops[index] - 1 for index in sampling], dtype=torch.int64)
        return RunOutput(
            self._logits(hidden[last.to(self.device)], [rows[index] for index in sampling]),
            tuple(all(finite[span]) for span in spans),
            tuple(
                self._prompt_logprobs(row, hidden[span])
                for row, span in zip(rows, spans, strict=True)
            ),
        )

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
        contexts = []
        for row in rows:
            request = row.request
            token_ids += request.token_slice(request.num_computed, row.num_new)
            positions += range(request.num_computed, request.num_computed + row.num_new)
            contexts.append(RowContext(request.pages, request.num_computed, row.num_new))
        uses = [(row.request.adapters, row.num_new) for row in rows]
        return Step(
            torch.tensor(token_ids, device=self.device),
            torch.tensor(positions, device=self.device),
            self.attention.prepare(contexts),
            self.lora_manager.bind(Part.layers, uses),
            self.lora_manager.bind(Part.embedding, uses),
        )
