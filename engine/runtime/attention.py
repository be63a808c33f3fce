"""Paged attention: describes a step to the attention kernels and keeps keys and values in the KV
pool.

Rows with one new token are grouped by context length, so that padding at most doubles a group's
work; prompts go one by one. Knows pages by number; who owns them is the scheduler's business.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from engine.config import KernelsConfig, KernelSet
from engine.device import Device
from engine.kernels.paged_attention import (
    DecodeRows,
    PrefillRow,
    decode_attention,
    prefill_attention,
    write_index,
    write_kv,
)
from engine.layers.attention import Attention, AttentionBackend, Rotation
from engine.layers.step import Step
from engine.models.decoder import DecoderModel
from engine.runtime.attention_space import AttentionSpace
from engine.runtime.decode_inputs import DecodeInputs

# A group gathers at most this many tokens of context at once, padding included.
MAX_GATHERED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class RowContext:
    """One row of a step: its pages, tokens already in them, and new tokens."""

    pages: Sequence[int]
    num_computed: int
    num_new: int


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step as the kernels want it.

    `write_index` [T * 2 * K]: where each token's keys and values go, as `write_kv` takes it.
    """

    write_index: torch.Tensor
    decode: tuple[DecodeRows, ...]
    prefill: tuple[PrefillRow, ...]


class PagedCaches(Protocol):
    """What attention needs of a KV pool: caches [2, pages, K, page_size, D], one a layer, the last
    page of which nobody owns.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def null_page(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def layers(self) -> list[torch.Tensor]: ...


class StepAttention(AttentionBackend):
    """A backend that describes a whole step at once; `name` is what the config calls it."""

    name: str
    page_size: int

    @abstractmethod
    def prepare(self, rows: Sequence[RowContext]) -> Any:
        """What `attend` reads from `step.attention`, for a step of `rows` in token order."""

    def static_step(self, inputs: DecodeInputs, size: int) -> Any:
        """The same for decode steps of `size` rows that `inputs` describe anew each time, for
        backends whose steps can be captured.
        """
        raise NotImplementedError(f"steps of {type(self).__name__} cannot be captured")


def open_attention(
    cfg: KernelsConfig,
    kv_pool: PagedCaches,
    model: DecoderModel,
    device: Device,
    space: AttentionSpace,
) -> StepAttention:
    """The backend that `kernels.attention` names."""
    if cfg.attention is KernelSet.reference:
        return PagedAttention(cfg, kv_pool, model, device)
    from engine.runtime.triton_attention import TritonAttention

    name = cfg.attention.value
    return TritonAttention(name, kv_pool, model, space.decode, device.torch_device)


def new_slots(rows: Sequence[RowContext], page_size: int) -> torch.Tensor:
    """Where the rows' new tokens lie, page * page_size + offset within the page, int64 [T]."""
    slots = []
    for row in rows:
        positions = np.arange(row.num_computed, row.num_computed + row.num_new)
        pages = np.asarray(row.pages)[positions // page_size]
        slots.append(pages * page_size + positions % page_size)
    return torch.from_numpy(np.concatenate(slots))


class PagedAttention(StepAttention):
    """The plain-torch backend."""

    def __init__(
        self, cfg: KernelsConfig, kv_pool: PagedCaches, model: DecoderModel, device: Device
    ) -> None:
        self.name = cfg.attention.value
        self._caches = kv_pool.layers
        self._values_at = kv_pool.num_pages + 1
        self._null_page = kv_pool.null_page
        self.page_size = kv_pool.page_size
        self._kv_heads, self._head_dim, _ = model.kv_shape
        self._window = model.spec.sliding_window
        self._scale = 1 / math.sqrt(self._head_dim)
        self._dtype = model.dtype
        self._device = device.torch_device
        self._heads = np.arange(self._kv_heads)

    def prepare(self, rows: Sequence[RowContext]) -> PagedStep:
        """Describe a step of `rows`, in token order."""
        decode: dict[int, list[tuple[int, RowContext]]] = defaultdict(list)
        prefill: list[PrefillRow] = []
        token = 0
        for row in rows:
            if row.num_new == 1:
                num_pages = self._pages_for(row.num_computed + 1)
                decode[num_pages.bit_length()].append((token, row))
            else:
                prefill.append(self._prefill_row(token, row))
            token += row.num_new
        groups = [group for key in sorted(decode) for group in self._decode_groups(decode[key])]
        if len(groups) == 1 and not prefill:
            groups = [replace(groups[0], rows=None)]
        index = write_index(new_slots(rows, self.page_size), self._caches[0])
        return PagedStep(index.to(self._device), tuple(groups), tuple(prefill))

    def attend(
        self, layer: Attention, qkv: torch.Tensor, rotation: Rotation, step: Step
    ) -> torch.Tensor:
        """qkv [T, (H + 2K) * D] -> [T, H * D]."""
        paged: PagedStep = step.attention
        cache = self._caches[layer.layer]
        q, k, v = layer.rotated(qkv, rotation)
        write_kv(cache, paged.write_index, k, v)
        if len(paged.decode) == 1 and paged.decode[0].rows is None:
            return decode_attention(q, cache, paged.decode[0], self._scale)
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        for group in paged.decode:
            out[group.rows] = decode_attention(q[group.rows], cache, group, self._scale)
        for row in paged.prefill:
            own = slice(row.start, row.stop)
            out[own] = prefill_attention(q[own], k[own], v[own], cache, row, self._scale)
        return out

    def _decode_groups(self, rows: list[tuple[int, RowContext]]) -> list[DecodeRows]:
        most_pages = max(self._pages_for(row.num_computed + 1) for _, row in rows)
        per_group = max(1, MAX_GATHERED_TOKENS // (most_pages * self.page_size))
        return [
            self._decode_group(rows[i : i + per_group], most_pages)
            for i in range(0, len(rows), per_group)
        ]

    def _decode_group(self, rows: list[tuple[int, RowContext]], num_pages: int) -> DecodeRows:
        pages = np.full((len(rows), num_pages), self._null_page)
        for i, (_, row) in enumerate(rows):
            used = row.pages[:num_pages]
            pages[i, : len(used)] = used
        lengths = np.array([row.num_computed + 1 for _, row in rows])[:, None]
        positions = np.arange(num_pages * self.page_size)
        bias = self._bias(positions[None], lengths - 1)
        return DecodeRows(
            torch.tensor([token for token, _ in rows], device=self._device),
            self._head_pages(pages),
            bias.repeat_interleave(self._kv_heads, 0)[:, None].to(self._device),
        )

    def _prefill_row(self, token: int, row: RowContext) -> PrefillRow:
        context = row.num_computed + row.num_new
        stop = token + row.num_new
        if row.num_computed == 0 and (self._window is None or context <= self._window):
            return PrefillRow(token, stop, context, None, None)
        num_pages = self._pages_for(context)
        pages = np.asarray(row.pages[:num_pages])[None]
        queries = np.arange(row.num_computed, context)[:, None]
        bias = self._bias(np.arange(context)[None], queries)
        return PrefillRow(token, stop, context, self._head_pages(pages), bias.to(self._device))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _head_pages(self, pages: np.ndarray) -> torch.Tensor:
        """Page numbers [B, P] -> indexes of heads' pages, keys then values [2 * B * K * P]."""
        keys = (pages[:, None, :] * self._kv_heads + self._heads[None, :, None]).ravel()
        both = np.concatenate((keys, keys + self._values_at * self._kv_heads))
        return torch.from_numpy(both).to(self._device)

    def _bias(self, keys: np.ndarray, queries: np.ndarray) -> torch.Tensor:
        """0 where the query position may read the key position, -inf elsewhere; shapes
        broadcast.
        """
        visible = keys <= queries
        if self._window is not None:
            visible &= keys > queries - self._window
        bias = torch.zeros(visible.shape, dtype=self._dtype)
        return bias.masked_fill_(torch.from_numpy(~visible), -torch.inf)
