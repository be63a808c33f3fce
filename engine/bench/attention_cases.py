"""Cases of the kernels around attention: decode, prefill, and what stores keys and values.

Pages of a row lie anywhere in the cache, as in a pool that has been used.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from engine.bench.kernel_case import Case, Prepared, deviation
from engine.bench.shapes import ITEM_BYTES, ModelShape
from engine.kernels import attention_reference, fused_reference
from engine.kernels.decode_attention import decode_attention, decode_workspace
from engine.kernels.fused_rope import rope_write_kv
from engine.kernels.prefill_attention import prefill_attention
from engine.runtime.attention_space import table_pages

_SMS_WITHOUT_A_CARD = 3


@dataclass(frozen=True, slots=True)
class Target:
    """Where tensors of a case live."""

    device: torch.device
    dtype: torch.dtype

    @property
    def num_sms(self) -> int:
        if self.device.type != "cuda":
            return _SMS_WITHOUT_A_CARD
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(scale)

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True, slots=True)
class Rows:
    """Lengths in tokens of a batch's rows, new ones included; `new` of each: 1 decodes."""

    lengths: tuple[int, ...]
    new: int = 1
    page_size: int = 16

    @property
    def words(self) -> str:
        low, high = min(self.lengths), max(self.lengths)
        context = f"{low}" if low == high else f"{low}..{high}"
        pages = "" if self.page_size == 16 else f", pages of {self.page_size}"
        cached = f" after {low - self.new}" if low > self.new else ""
        if self.new > 1:
            return f"{len(self.lengths)} x {self.new}{cached}{pages}"
        return f"batch {len(self.lengths)}, context {context}{pages}"


def decode_cases(shape: ModelShape, batches: Sequence[Rows], target: Target) -> Iterator[Case]:
    for rows in batches:
        yield Case("decode_attention", rows.words, partial(_decode, shape, rows, target))


def prefill_cases(shape: ModelShape, batches: Sequence[Rows], target: Target) -> Iterator[Case]:
    for rows in batches:
        yield Case("prefill_attention", rows.words, partial(_prefill, shape, rows, target))


def rope_cases(shape: ModelShape, tokens: Sequence[int], target: Target) -> Iterator[Case]:
    for count in tokens:
        yield Case("rope_write_kv", f"{count} tokens", partial(_rope, shape, count, target))


def _paged(shape: ModelShape, rows: Rows, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache [2, P, K, S, D] and page table int32 [B, pages]."""
    used = [-(-length // rows.page_size) for length in rows.lengths]
    numbers = torch.randperm(sum(used), dtype=torch.int32)
    table = torch.zeros(len(used), table_pages(max(rows.lengths), rows.page_size)).int()
    for row, own in enumerate(torch.split(numbers, used)):
        table[row, : len(own)] = own
    cache = target.random(2, sum(used), shape.kv_heads, rows.page_size, shape.head_dim)
    return cache, table.to(target.device)


def _decode(shape: ModelShape, rows: Rows, target: Target) -> Prepared:
    cache, table = _paged(shape, rows, target)
    batch, scale = len(rows.lengths), 1 / math.sqrt(shape.head_dim)
    q, lengths = target.random(batch, shape.heads, shape.head_dim), target.ints(rows.lengths)
    workspace = decode_workspace(
        max_rows=batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_tokens=table.shape[1] * rows.page_size,
        num_sms=target.num_sms,
        device=target.device,
    )

    def call() -> torch.Tensor:
        return decode_attention(q, cache, table, lengths, scale, None, workspace)

    def off_by() -> float:
        expected = attention_reference.decode_attention(q, cache, table, lengths, scale, None)
        return deviation([call()], [expected])

    kv_numbers = 2 * sum(rows.lengths) * shape.kv_heads * shape.head_dim
    flops = 4 * sum(rows.lengths) * shape.heads * shape.head_dim
    return Prepared(call, off_by, ITEM_BYTES * (kv_numbers + 2 * q.numel()), flops)


def _prefill(shape: ModelShape, rows: Rows, target: Target) -> Prepared:
    cache, table = _paged(shape, rows, target)
    batch, scale = len(rows.lengths), 1 / math.sqrt(shape.head_dim)
    q = target.random(batch * rows.new, shape.heads, shape.head_dim)
    starts = target.ints([rows.new * row for row in range(batch + 1)])
    lengths = target.ints(rows.lengths)

    def call() -> torch.Tensor:
        return prefill_attention(q, cache, table, starts, lengths, rows.new, scale, None)

    def off_by() -> float:
        reference = attention_reference.prefill_attention
        expected = reference(q, cache, table, starts, lengths, rows.new, scale, None)
        return deviation([call()], [expected])

    kv_numbers = 2 * sum(rows.lengths) * shape.kv_heads * shape.head_dim
    seen = sum((length - rows.new) * rows.new for length in rows.lengths)
    seen += batch * rows.new * (rows.new + 1) // 2
    flops = 4 * seen * shape.heads * shape.head_dim
    num_bytes = ITEM_BYTES * (kv_numbers + 2 * q.numel())
    if any(length != rows.new for length in rows.lengths):
        return Prepared(call, off_by, num_bytes, flops)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    dense_q, k, v = (target.random(batch, count, rows.new, shape.head_dim) for count in heads)

    def peer() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            dense_q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )

    return Prepared(call, off_by, num_bytes, flops, peer, "scaled_dot_product_attention")


def _rope(shape: ModelShape, tokens: int, target: Target) -> Prepared:
    page_size, head_dim = 16, shape.head_dim
    qkv = target.random(tokens, (shape.heads + 2 * shape.kv_heads) * head_dim)
    cos, sin = target.random(tokens, head_dim), target.random(tokens, head_dim)
    pages = -(-tokens // page_size) + 1
    cache = target.random(2, pages, shape.kv_heads, page_size, head_dim)
    slots = torch.randperm(pages * page_size, device=target.device)[:tokens]

    def call() -> torch.Tensor:
        return rope_write_kv(qkv, cos, sin, cache, slots, shape.heads, None, None, 1e-5)

    def off_by() -> float:
        wanted = cache.clone()
        reference = fused_reference.rope_write_kv
        q = reference(qkv, cos, sin, wanted, slots, shape.heads, None, None, 1e-5)
        return deviation([call(), cache], [q, wanted])

    numbers = 2 * qkv.numel() + cos.numel() + sin.numel()
    num_bytes = ITEM_BYTES * numbers + slots.numel() * slots.itemsize
    return Prepared(call, off_by, num_bytes, 6 * qkv.numel())
