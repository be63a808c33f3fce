"""Paged attention by the Triton kernels: describes a step to them and keeps keys and values in the
KV pool.

Leading rows of one new token, which is how the scheduler puts decoding requests, are one launch of
the decode kernel, the others one of the prefill kernel. A step's tables go to the device in one
copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.decode_attention import DecodeWorkspace, decode_attention
from engine.kernels.fused_rope import rope_write_kv
from engine.kernels.prefill_attention import prefill_attention
from engine.layers.attention import Attention, Rotation
from engine.layers.step import Step
from engine.models.decoder import DecoderModel
from engine.runtime.attention import PagedCaches, RowContext, StepAttention, new_slots
from engine.runtime.attention_space import table_pages
from engine.runtime.decode_inputs import DecodeInputs


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of one launch, int32: `page_table` [B, pages], `lengths` [B] with the new tokens."""

    page_table: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A step as the kernels want it; `slots` int32 [T] as `rope_write_kv` takes them.

    The first `num_decode` tokens are those of the rows `decode`. The rows `prefill` have at most
    `max_query` new tokens each, from `query_starts` int32 [B + 1] on, counted from the first.
    """

    slots: torch.Tensor
    num_decode: int
    decode: PagedRows
    prefill: PagedRows
    query_starts: torch.Tensor
    max_query: int


class TritonAttention(StepAttention):
    """The backend of `kernels.attention=triton`."""

    def __init__(
        self,
        name: str,
        kv_pool: PagedCaches,
        model: DecoderModel,
        workspace: DecodeWorkspace,
        device: torch.device,
    ) -> None:
        self.name = name
        self.page_size = kv_pool.page_size
        self._kv_pool = kv_pool
        self._window = model.spec.sliding_window
        self._scale = 1 / math.sqrt(model.kv_shape[1])
        self._workspace = workspace
        self._device = device

    def prepare(self, rows: Sequence[RowContext]) -> TritonStep:
        """Describe a step of `rows`, in token order."""
        page_size = self.page_size
        lengths = [row.num_computed + row.num_new for row in rows]
        num_new = [row.num_new for row in rows]
        num_decode = next((i for i, count in enumerate(num_new) if count > 1), len(rows))
        starts = np.cumsum([0, *num_new[num_decode:]])
        table = np.zeros((len(rows), table_pages(max(lengths), page_size)), dtype=np.int32)
        for own, row, length in zip(table, rows, lengths, strict=True):
            num_pages = -(-length // page_size)
            own[:num_pages] = row.pages[:num_pages]
        slots = new_slots(rows, page_size).numpy()
        sizes = [slots.size, table.size, len(rows), len(starts)]
        packed = np.concatenate([slots, table.ravel(), lengths, starts], dtype=np.int32)
        parts = torch.split(torch.from_numpy(packed).to(self._device, non_blocking=True), sizes)
        tables, counts = parts[1].view(table.shape), parts[2]
        return TritonStep(
            parts[0],
            num_decode,
            PagedRows(tables[:num_decode], counts[:num_decode]),
            PagedRows(tables[num_decode:], counts[num_decode:]),
            parts[3],
            max(num_new[num_decode:], default=0),
        )

    def static_step(self, inputs: DecodeInputs, size: int) -> TritonStep:
        """Decode steps of `size` rows, as `inputs` describe them when they run."""
        none = inputs.lengths[:0]
        return TritonStep(
            inputs.slots[:size],
            size,
            PagedRows(inputs.page_table[:size], inputs.lengths[:size]),
            PagedRows(inputs.page_table[:0], none),
            none,
            0,
        )

    def attend(
        self, layer: Attention, qkv: torch.Tensor, rotation: Rotation, step: Step
    ) -> torch.Tensor:
        """qkv [T, (H + 2K) * D] -> [T, H * D]."""
        own: TritonStep = step.attention
        cache = self._kv_pool.layers[layer.layer]
        q_norm, k_norm = layer.q_norm, layer.k_norm
        q = rope_write_kv(
            qkv,
            rotation.cos[:, 0],
            rotation.sin[:, 0],
            cache,
            own.slots,
            layer.num_heads,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
        )
        parts = []
        if own.num_decode:
            parts.append(self._decode(q[: own.num_decode], cache, own.decode))
        if own.max_query:
            parts.append(self._prefill(q[own.num_decode :], cache, own))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, q: torch.Tensor, cache: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        return decode_attention(
            q,
            cache,
            rows.page_table,
            rows.lengths,
            self._scale,
            self._window,
            self._workspace,
        )

    def _prefill(self, q: torch.Tensor, cache: torch.Tensor, own: TritonStep) -> torch.Tensor:
        return prefill_attention(
            q,
            cache,
            own.prefill.page_table,
            own.query_starts,
            own.prefill.lengths,
            own.max_query,
            self._scale,
            self._window,
        )
