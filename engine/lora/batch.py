"""The adapters of one step: which tokens use which rows of the rank pool, as the kernels want it.

Tokens come sorted by their adapter's place in the pool, base tokens first. Adapters with many
tokens become spans; those with few are put together into runs of neighbouring rank blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.lora import BLOCK_ROWS, LoRABlocks, LoRASpan

# An adapter with more tokens than this in a step is a span of its own.
MAX_BLOCK_TOKENS = 16
# Idle blocks between two adapters that are computed for nothing rather than starting another run.
MAX_IDLE_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start`..`stop` belong to the adapter that owns pool rows `row_start`..`row_stop`."""

    start: int
    stop: int
    row_start: int
    row_stop: int


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """A step's tokens by adapter; together the two parts cover every adapter's token once."""

    spans: tuple[LoRASpan, ...]
    blocks: tuple[LoRABlocks, ...]

    @classmethod
    def bind(cls, segments: Sequence[Segment], device: torch.device) -> "LoRABatch":
        """`segments` must ascend in tokens and in rows, one per adapter, rows in whole blocks."""
        spans, few = [], []
        for segment in segments:
            if segment.stop - segment.start > MAX_BLOCK_TOKENS:
                rows = segment.row_start, segment.row_stop
                spans.append(LoRASpan(segment.start, segment.stop, *rows))
            else:
                few.append(segment)
        return cls(tuple(spans), tuple(_blocks(run, device) for run in _runs(few)))


def _runs(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments whose blocks lie together, up to MAX_IDLE_BLOCKS apart."""
    runs: list[list[Segment]] = []
    for segment in segments:
        gap = segment.row_start - runs[-1][-1].row_stop if runs else 0
        if not runs or gap > MAX_IDLE_BLOCKS * BLOCK_ROWS:
            runs.append([])
        runs[-1].append(segment)
    return runs


def _blocks(run: Sequence[Segment], device: torch.device) -> LoRABlocks:
    row_start, row_stop = run[0].row_start, run[-1].row_stop
    width = max(segment.stop - segment.start for segment in run)
    num_blocks = (row_stop - row_start) // BLOCK_ROWS
    tokens = torch.zeros((num_blocks, width), dtype=torch.int64)
    real = torch.zeros((num_blocks, width), dtype=torch.bool)
    for segment in run:
        first = (segment.row_start - row_start) // BLOCK_ROWS
        last = (segment.row_stop - row_start) // BLOCK_ROWS
        count = segment.stop - segment.start
        tokens[first:last, :count] = torch.arange(segment.start, segment.stop)
        real[first:last, :count] = True
    places = real.view(-1).nonzero().view(-1)
    flat = tokens.view(-1)
    all_real = len(places) == len(flat)
    return LoRABlocks(
        row_start,
        row_stop,
        width,
        flat.to(device),
        None if all_real else places.to(device),
        flat[places].to(device),
    )
