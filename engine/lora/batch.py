"""The adapters of one step: which tokens use which rows of the rank pool, as the kernels want it.

Neighbours in the pool of equal rank and about as many tokens become one run, as long as little is
computed for nothing: padding to a power of two, idle rows between. Weighted and several adapters,
and the seldom adapted embedding and head, go adapter by adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.lora import LooseRows, LoRARun, LoRAWork, SavedRows, VectorRows
from engine.lora.adapter import EMBEDDING, HEAD, AdapterLayout, Part

# Up to so many tokens of an adapter are padded to a power of two; others are computed as they are.
MAX_PADDED_TOKENS = 16
# Idle ranges between two adapters that are computed for nothing rather than starting another run.
MAX_IDLE_RANGES = 2


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a resident adapter lies: pool rows `row_start`..`row_stop`, and the pool's matrices
    that hold its saved modules, in the order of `layout.saved`.
    """

    layout: AdapterLayout
    row_start: int
    row_stop: int
    matrices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Portion:
    """Tokens `start`..`stop` use the adapter at `placement` with `weight`; `alone`: no other."""

    start: int
    stop: int
    placement: Placement
    weight: float = 1.0
    alone: bool = True

    @property
    def in_runs(self) -> bool:
        return self.alone and self.weight == 1.0


@dataclass(frozen=True, slots=True)
class Segment:
    """An adapter that owns pool rows `row_start`..`row_stop`, and all its tokens in the step."""

    tokens: tuple[int, ...]
    row_start: int
    row_stop: int

    @property
    def width(self) -> int:
        """Tokens that are computed for it, padding included; its own business alone, so that the
        bits of its products do not depend on who else is there.
        """
        count = len(self.tokens)
        return count if count > MAX_PADDED_TOKENS else 1 << (count - 1).bit_length()

    @property
    def rank(self) -> int:
        return self.row_stop - self.row_start


@dataclass(frozen=True, slots=True)
class Users:
    """A part's portions: those whose adapter has pool rows for it, and those whose adapter replaces
    `module`, the embedding or the head, whole.
    """

    module: str | None
    with_rows: tuple[Portion, ...]
    with_saved: tuple[Portion, ...]


def find_users(part: Part, portions: Sequence[Portion]) -> Users:
    module = {Part.embedding: EMBEDDING, Part.head: HEAD}.get(part)
    with_rows = tuple(own for own in portions if part in own.placement.layout.parts)
    with_saved = tuple(own for own in portions if module in own.placement.layout.saved)
    return Users(module, with_rows, with_saved)


def bind_work(
    part: Part, portions: Sequence[Portion], device: torch.device, dtype: torch.dtype
) -> LoRAWork | None:
    """The work of one part of the model; None if no portion's adapter changes it.

    `portions` must ascend in tokens. Weights become tensors of `dtype`.
    """
    users = find_users(part, portions)
    with_rows = users.with_rows
    if not with_rows and not users.with_saved:
        return None
    in_runs = [own for own in with_rows if part is Part.layers and own.in_runs]
    loose = [own for own in with_rows if part is not Part.layers or not own.in_runs]
    gains = [own for own in with_rows if own.placement.layout.gain_row is not None]
    # An embedding has no biases, whatever other parts of the adapter have.
    biased = () if part is Part.embedding else with_rows
    biases = [own for own in biased if own.placement.layout.bias_row is not None]
    return LoRAWork(
        bind_runs(_segments(in_runs), device),
        tuple(_loose(own, device, dtype) for own in loose),
        _vectors([(own, own.placement.layout.gain_row) for own in gains], device, dtype),
        _vectors([(own, own.placement.layout.bias_row) for own in biases], device, dtype),
        bind_saved(users, device, dtype),
    )


def bind_saved(users: Users, device: torch.device, dtype: torch.dtype) -> tuple[SavedRows, ...]:
    """Tokens and matrices of the portions whose adapter replaces the part's module."""
    return tuple(_saved(own, str(users.module), device, dtype) for own in users.with_saved)


def bind_runs(segments: Sequence[Segment], device: torch.device) -> tuple[LoRARun, ...]:
    """Runs that together cover every segment's tokens once."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda own: own.row_start):
        if groups and _joins(groups[-1][-1], segment):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return tuple(_run(group, device) for group in groups)


def _segments(portions: Sequence[Portion]) -> list[Segment]:
    """All tokens of each adapter."""
    tokens: dict[Placement, list[int]] = {}
    for own in portions:
        tokens.setdefault(own.placement, []).extend(range(own.start, own.stop))
    return [Segment(tuple(ids), at.row_start, at.row_stop) for at, ids in tokens.items()]


def _joins(last: Segment, segment: Segment) -> bool:
    """Whether `segment` may be computed together with `last`, which lies before it."""
    gap = segment.row_start - last.row_stop
    if (segment.rank, segment.width) != (last.rank, last.width):
        return False
    return gap % last.rank == 0 and gap <= MAX_IDLE_RANGES * last.rank


def _run(group: Sequence[Segment], device: torch.device) -> LoRARun:
    first, last = group[0], group[-1]
    count = (last.row_stop - first.row_start) // first.rank
    tokens = np.zeros((count, first.width), dtype=np.int64)
    is_own = np.zeros((count, first.width), dtype=bool)
    for segment in group:
        index = (segment.row_start - first.row_start) // first.rank
        tokens[index, : len(segment.tokens)] = segment.tokens
        is_own[index, : len(segment.tokens)] = True
    own, places = tokens[is_own], np.flatnonzero(is_own)
    start, is_full = int(own[0]), len(own) == is_own.size
    in_order = is_full and np.array_equal(own, np.arange(start, start + len(own)))
    return LoRARun(
        first.row_start,
        last.row_stop,
        first.rank,
        first.width,
        torch.from_numpy(tokens.ravel()).to(device),
        torch.from_numpy(own).to(device),
        None if is_full else torch.from_numpy(places).to(device),
        slice(start, start + len(own)) if in_order else None,
    )


def _loose(own: Portion, device: torch.device, dtype: torch.dtype) -> LooseRows:
    start = own.placement.row_start
    stop = start + own.placement.layout.rank
    return LooseRows(start, stop, *_tokens([own], device, dtype))


def _saved(own: Portion, module: str, device: torch.device, dtype: torch.dtype) -> SavedRows:
    index = own.placement.layout.saved.index(module)
    return SavedRows(own.placement.matrices[index], *_tokens([own], device, dtype))


def _vectors(
    found: Sequence[tuple[Portion, int | None]], device: torch.device, dtype: torch.dtype
) -> VectorRows | None:
    if not found:
        return None
    rows = [
        torch.full((own.stop - own.start,), own.placement.row_start + (row or 0))
        for own, row in found
    ]
    tokens, weights = _tokens([own for own, _ in found], device, dtype)
    return VectorRows(tokens, torch.cat(rows).to(device), weights)


def _tokens(
    portions: Sequence[Portion], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token indexes [n] and weights [n, 1] (None: all 1) of `portions`."""
    tokens = torch.cat([torch.arange(own.start, own.stop) for own in portions]).to(device)
    if all(own.weight == 1.0 for own in portions):
        return tokens, None
    weights = [torch.full((own.stop - own.start, 1), own.weight, dtype=dtype) for own in portions]
    return tokens, torch.cat(weights).to(device)
