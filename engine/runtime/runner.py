"""The model runner: from scheduled rows to logits. It only delegates: adapters, attention and model
own their work.
"""

from collections.abc import Sequence

import torch

from engine.device import Device
from engine.layers.step import Step
from engine.lora.manager import LoRAManager
from engine.models.decoder import DecoderModel
from engine.runtime.attention import PagedAttention, RowContext
from engine.runtime.request import ScheduledRow


class ModelRunner:
    """Runs one forward pass at a time."""

    def __init__(
        self,
        model: DecoderModel,
        attention: PagedAttention,
        lora_manager: LoRAManager,
        device: Device,
    ) -> None:
        self.model = model
        self.attention = attention
        self.lora_manager = lora_manager
        self.device = device.torch_device

    def order(self, rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
        """The rows as adapters lie in the pool, base rows first."""
        return sorted(rows, key=lambda row: self.lora_manager.order(row.request.lora_id))

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        """Logits [N, vocab] of the rows that sample, in the order of `rows`, which must be
        `order`ed.
        """
        return self.model.forward(self._step(rows), self.attention)

    def _step(self, rows: Sequence[ScheduledRow]) -> Step:
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        contexts = []
        for row in rows:
            request = row.request
            token_ids += request.token_slice(request.num_computed, row.num_new)
            positions += range(request.num_computed, request.num_computed + row.num_new)
            contexts.append(RowContext(request.pages, request.num_computed, row.num_new))
            if row.samples:
                logit_rows.append(len(token_ids) - 1)
        return Step(
            torch.tensor(token_ids, device=self.device),
            torch.tensor(positions, device=self.device),
            torch.tensor(logit_rows, dtype=torch.int64, device=self.device),
            self.attention.prepare(contexts),
            self.lora_manager.bind([(row.request.lora_id, row.num_new) for row in rows]),
        )
