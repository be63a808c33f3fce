"""The adapters of one step: which tokens use which rows of the rank pool, as the kernels want it.

Tokens come sorted by their adapter's place in the pool, base tokens first. Neighbours of equal rank
become one run as long as little is computed for nothing: padding to the longest, idle rows between.
Weighted and several adapters, and the seldom adapted embedding and head, go adapter by adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.lora import LooseRows, LoRARun, LoRAWork, SavedRows, VectorRows
from engine.lora.adapter import EMBEDDING, HEAD, AdapterLayout, Part

# Segments of different lengths share a run if none is longer than this.
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
    """Tokens `start`..`stop` belong to the adapter that owns pool rows `row_start`..`row_stop`."""

    start: int
    stop: int
    row_start: int
    row_stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def rank(self) -> int:
        return self.row_stop - self.row_start


def bind_work(
    part: Part, portions: Sequence[Portion], device: torch.device, dtype: torch.dtype
) -> LoRAWork | None:
    """The work of one part of the model; None if no portion's adapter changes it.

    `portions` must ascend in tokens; those `in_runs` also in rows, one per adapter, with no base
    token between. Weights become tensors of `dtype`.
    """
    with_rows = [own for own in portions if part in own.placement.layout.parts]
    module = {Part.embedding: EMBEDDING, Part.head: HEAD}.get(part)
    with_saved = [own for own in portions if module in own.placement.layout.saved]
    if not with_rows and not with_saved:
        return None
    segments = [
        Segment(own.start, own.stop, own.placement.row_start, own.placement.row_stop)
        for own in with_rows
        if part is Part.layers and own.in_runs
    ]
    loose = [own for own in with_rows if part is not Part.layers or not own.in_runs]
    gains = [own for own in with_rows if own.placement.layout.gain_row is not None]
    # An embedding has no biases, whatever other parts of the adapter have.
    biased = [] if part is Part.embedding else with_rows
    biases = [own for own in biased if own.placement.layout.bias_row is not None]
    return LoRAWork(
        bind_runs(segments, device),
        tuple(_loose(own, device, dtype) for own in loose),
        _vectors([(own, own.placement.layout.gain_row) for own in gains], device, dtype),
        _vectors([(own, own.placement.layout.bias_row) for own in biases], device, dtype),
        tuple(_saved(own, str(module), device, dtype) for own in with_saved),
    )


def bind_runs(segments: Sequence[Segment], device: torch.device) -> tuple[LoRARun, ...]:
    """Runs that together cover every segment's token once."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if groups and _joins(groups[-1], segment):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return tuple(_run(group, device) for group in groups)


def _joins(group: Sequence[Segment], segment: Segment) -> bool:
    """Whether `segment` may be computed together with `group`, which lies before it."""
    last = group[-1]
    gap = segment.row_start - last.row_stop
    if segment.start != last.stop:
        return False
    if segment.rank != last.rank or gap % last.rank or gap > MAX_IDLE_RANGES * last.rank:
        return False
    if segment.num_tokens == last.num_tokens and gap == 0:
        return True
    return max(segment.num_tokens, *(s.num_tokens for s in group)) <= MAX_PADDED_TOKENS


def _run(group: Sequence[Segment], device: torch.device) -> LoRARun:
    first, last = group[0], group[-1]
    width = max(segment.num_tokens for segment in group)
    count = (last.row_stop - first.row_start) // first.rank
    tokens: torch.Tensor | None = None
    places: torch.Tensor | None = None
    if count * width != last.stop - first.start:
        tokens = torch.zeros((count, width), dtype=torch.int64)
        found = []
        for segment in group:
            index = (segment.row_start - first.row_start) // first.rank
            tokens[index, : segment.num_tokens] = torch.arange(segment.start, segment.stop)
            found.append(torch.arange(segment.num_tokens) + index * width)
        tokens, places = tokens.view(-1).to(device), torch.cat(found).to(device)
    rows = first.row_start, last.row_stop
    return LoRARun(first.start, last.stop, *rows, first.rank, width, tokens, places)


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
