"""The adapters of one step: which tokens use which rows of the rank pool, cut into tiles for the
kernels.

Tokens come sorted by their adapter's place in the pool, base tokens first. A tile covers
neighbouring adapters: one tile an adapter does the least arithmetic, one tile for all the fewest
calls; the cheapest cut is found by dynamic programming over a two-number cost model.
"""

from dataclasses import dataclass

import torch

from engine.kernels.lora import LoRATile

# What one tile costs besides arithmetic, in (token x rank row) units. Fitted on the CPU with
# SmolLM2: a tile makes
# about 20 small calls a layer, a token x row about 20k multiply-adds.
TILE_COST = 110


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start`..`stop` belong to the adapter that owns pool rows `row_start`..`row_stop`."""

    start: int
    stop: int
    row_start: int
    row_stop: int


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """Tiles of a step, in token order."""

    tiles: tuple[LoRATile, ...]

    @classmethod
    def bind(
        cls, segments: tuple[Segment, ...], dtype: torch.dtype, device: torch.device
    ) -> "LoRABatch":
        """`segments` must ascend in tokens and in rows, one per adapter."""
        return cls(tuple(_tile(segments[i:j], dtype, device) for i, j in cheapest_cuts(segments)))


def cheapest_cuts(segments: tuple[Segment, ...]) -> list[tuple[int, int]]:
    """Cut `segments` into runs (i, j) so that sum(TILE_COST + tokens x rows) over the runs is
    least.
    """
    best: list[float] = [0.0]
    cut_before: list[int] = [0]
    for j in range(1, len(segments) + 1):
        options = []
        for i in range(j):
            tokens = segments[j - 1].stop - segments[i].start
            rows = segments[j - 1].row_stop - segments[i].row_start
            options.append((best[i] + TILE_COST + tokens * rows, i))
        cost, i = min(options)
        best.append(cost)
        cut_before.append(i)
    runs: list[tuple[int, int]] = []
    end = len(segments)
    while end:
        runs.append((cut_before[end], end))
        end = cut_before[end]
    return runs[::-1]


def _tile(run: tuple[Segment, ...], dtype: torch.dtype, device: torch.device) -> LoRATile:
    start, stop = run[0].start, run[-1].stop
    row_start, row_stop = run[0].row_start, run[-1].row_stop
    if len(run) == 1:
        return LoRATile(start, stop, row_start, row_stop, None)
    mask = torch.zeros((stop - start, row_stop - row_start), dtype=dtype)
    for segment in run:
        tokens = slice(segment.start - start, segment.stop - start)
        mask[tokens, segment.row_start - row_start : segment.row_stop - row_start] = 1
    return LoRATile(start, stop, row_start, row_stop, mask.to(device))
