"""Binding a step: which neighbours are computed together, and that padding is told apart."""

import torch

from engine.kernels.lora import LoRARun
from engine.lora.batch import MAX_IDLE_RANGES, MAX_PADDED_TOKENS, Segment, bind_runs

CPU = torch.device("cpu")
LONG = MAX_PADDED_TOKENS + 1


def shape(runs: tuple[LoRARun, ...]) -> list[tuple[int, int, int, int, int]]:
    return [(r.start, r.stop, r.row_start, r.row_stop, r.width) for r in runs]


def test_equal_neighbours_are_one_run_without_padding_however_long() -> None:
    for count in (1, 3, LONG):
        segments = [Segment(2 + i * count, 2 + (i + 1) * count, 8 * i, 8 * i + 8) for i in range(3)]
        runs = bind_runs(segments, CPU)
        assert shape(runs) == [(2, 2 + 3 * count, 0, 24, count)]
        assert runs[0].tokens is None and runs[0].places is None


def test_ranks_long_prompts_and_wide_gaps_start_another_run() -> None:
    ranks = [Segment(0, 1, 0, 8), Segment(1, 2, 8, 24)]
    lengths = [Segment(0, 1, 0, 8), Segment(1, 1 + LONG, 8, 16)]
    gap = 8 + (MAX_IDLE_RANGES + 1) * 8
    gaps = [Segment(0, 1, 0, 8), Segment(1, 2, gap, gap + 8)]
    odd_gap = [Segment(0, 1, 0, 16), Segment(1, 2, 24, 40)]
    for segments in (ranks, lengths, gaps, odd_gap):
        assert len(bind_runs(segments, CPU)) == 2


def test_short_segments_are_padded_and_every_token_has_its_place() -> None:
    segments = [Segment(1, 2, 0, 8), Segment(2, 5, 8, 16), Segment(5, 7, 24, 32)]
    (run,) = bind_runs(segments, CPU)
    assert (run.start, run.stop, run.row_start, run.row_stop, run.width) == (1, 7, 0, 32, 3)
    assert run.tokens is not None and run.places is not None
    assert run.tokens[run.places].tolist() == [1, 2, 3, 4, 5, 6]
    assert (run.places // 3).tolist() == [0, 1, 1, 1, 3, 3]
