"""The adapters of one step: which tokens use which rows of the rank pool, as the kernels want it.

Tokens come sorted by their adapter's place in the pool, base tokens first. Neighbours of equal rank
become one run as long as little is computed for nothing: padding to the longest, idle rows between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.lora import LoRARun

# Segments of different lengths share a run if none is longer than this.
MAX_PADDED_TOKENS = 16
# Idle ranges between two adapters that are computed for nothing rather than starting another run.
MAX_IDLE_RANGES = 2


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


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """A step's runs; together they cover every adapter's token once."""

    runs: tuple[LoRARun, ...]

    @classmethod
    def bind(cls, segments: Sequence[Segment], device: torch.device) -> "LoRABatch":
        """`segments` must ascend in tokens and in rows, one per adapter, no base token between."""
        groups: list[list[Segment]] = []
        for segment in segments:
            if groups and _joins(groups[-1], segment):
                groups[-1].append(segment)
            else:
                groups.append([segment])
        return cls(tuple(_run(group, device) for group in groups))


def _joins(group: Sequence[Segment], segment: Segment) -> bool:
    """Whether `segment` may be computed together with `group`, which lies before it."""
    last = group[-1]
    gap = segment.row_start - last.row_stop
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
