"""Decode graphs: the decoder's layers for padded batch sizes, captured once each with adapters and
once without, and which steps they can run.

A graph goes from embedded tokens to hidden states; embedding and head, whose adapters seldom
change anything, run outside. Its memory was reserved by the probe.
"""

from collections.abc import Sequence
from typing import Any

import torch
from loguru import logger

from engine.device import Device
from engine.models.decoder import DecoderModel
from engine.runtime.attention import StepAttention
from engine.runtime.decode_inputs import DecodeRow
from engine.runtime.decode_space import DecodeSpace
from engine.runtime.graph_capture import GraphCapturer, Replay, capture_layers


class DecodeGraphRunner:
    """Replays decode steps of up to `max_rows` rows; 0 if graphs are off."""

    def __init__(
        self, space: DecodeSpace, model: DecoderModel, attention: StepAttention, device: Device
    ) -> None:
        """Capture every size, the largest first."""
        self.max_rows = max(space.batch_sizes, default=0)
        self._inputs, self._lora, self._sizes = space.inputs, space.lora, space.batch_sizes
        self._model = model
        self._graphs: dict[tuple[int, bool], Replay] = {}
        if device.dry or not self.max_rows:
            return
        capturer = GraphCapturer(device)
        bound = [None] if self._lora is None else [self._lora.work, None]
        for size in reversed(self._sizes):
            for lora in bound:
                replay = capture_layers(capturer, model, attention, self._inputs, size, lora)
                self._graphs[size, lora is not None] = replay
        sizes = ", ".join(map(str, self._sizes))
        logger.info("decode graphs: {} captured, for {} rows", len(self._graphs), sizes)

    def run(
        self,
        rows: Sequence[DecodeRow],
        uses: Sequence[Any],
        embedding_lora: Any,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Hidden states [N, hidden] of 1..max_rows rows, which the next run overwrites; None if the
        adapters' `uses` (TokenUses) are more than a graph holds. `token_ids` int64 [N] are in the
        place of the rows' own, if these are known on the device alone.
        """
        if uses and not self._lora.fill(uses):
            return None
        size = next(size for size in self._sizes if size >= len(rows))
        self._inputs.fill(rows, size)
        own_ids = self._inputs.token_ids[: len(rows)]
        if token_ids is not None:
            own_ids.copy_(token_ids)
        hidden: torch.Tensor = self._inputs.hidden[: len(rows)]
        hidden.copy_(self._model.embedding(own_ids, embedding_lora))
        self._graphs[size, bool(uses)]()
        return hidden
