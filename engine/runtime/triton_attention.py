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
from engine.kernels.paged_attention import write_kv
from engine.kernels.prefill_attention import prefill_attention
from engine.layers.step import Step
from engine.memory.kv_pool import KVPool
from engine.models.decoder import DecoderModel
from engine.runtime.attention import RowContext, StepAttention, write_places

_LEAST_PAGES = 16


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A step as the kernels want it: int32, `write_index` int64 as `write_kv` takes it.

    `page_table` [B, pages], `lengths` [B] with the new tokens. The first `num_decode` rows have one
    new token each; the others, at most `max_query` each, have those from `query_starts`
    [B - num_decode + 1] on, counted from the first of them.
    """

    write_index: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor
    num_decode: int
    max_query: int


class TritonAttention(StepAttention):
    """The backend of `kernels.attention=triton`."""

    def __init__(
        self,
        name: str,
        kv_pool: KVPool,
        model: DecoderModel,
        workspace: DecodeWorkspace,
        device: torch.device,
    ) -> None:
        self.name = name
        self._kv_pool = kv_pool
        self._window = model.spec.sliding_window
        self._scale = 1 / math.sqrt(model.kv_shape[1])
        self._workspace = workspace
        self._device = device

    def prepare(self, rows: Sequence[RowContext]) -> TritonStep:
        """Describe a step of `rows`, in token order."""
        page_size = self._kv_pool.page_size
        lengths = [row.num_computed + row.num_new for row in rows]
        num_new = [row.num_new for row in rows]
        num_decode = next((i for i, count in enumerate(num_new) if count > 1), len(rows))
        starts = np.cumsum([0, *num_new[num_decode:]])
        # The width decides how rows are split: a power of two, so that it seldom changes.
        most_pages = max(_LEAST_PAGES, -(-max(lengths) // page_size))
        table = np.zeros((len(rows), 1 << (most_pages - 1).bit_length()), dtype=np.int32)
        for own, row, length in zip(table, rows, lengths, strict=True):
            num_pages = -(-length // page_size)
            own[:num_pages] = row.pages[:num_pages]
        places = write_places(rows, self._kv_pool)
        sizes = [places.size * 2, table.size, len(rows), len(starts)]
        packed = np.concatenate(
            [places.view(np.int32), table.ravel(), lengths, starts], dtype=np.int32
        )
        parts = torch.split(torch.from_numpy(packed).to(self._device, non_blocking=True), sizes)
        return TritonStep(
            parts[0].view(torch.int64),
            parts[1].view(table.shape),
            parts[2],
            parts[3],
            num_decode,
            max(num_new[num_decode:], default=0),
        )

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Store k, v [T, K, D], return [T, H * D]."""
        own: TritonStep = step.attention
        cache = self._kv_pool.layers[layer]
        write_kv(cache, own.write_index, k, v)
        n, parts = own.num_decode, []
        if n:
            table, lengths = own.page_table[:n], own.lengths[:n]
            parts.append(
                decode_attention(
                    q[:n], cache, table, lengths, self._scale, self._window, self._workspace
                )
            )
        if own.max_query:
            table, lengths = own.page_table[n:], own.lengths[n:]
            starts, most = own.query_starts, own.max_query
            parts.append(
                prefill_attention(
                    q[n:], cache, table, starts, lengths, most, self._scale, self._window
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
