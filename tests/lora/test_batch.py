"""Binding a step: which neighbours are computed together, and that padding is told apart."""

import torch

from engine.kernels.lora import LoRARun
from engine.lora.batch import MAX_IDLE_RANGES, MAX_PADDED_TOKENS, Segment, bind_runs

CPU = torch.device("cpu")
LONG = MAX_PADDED_TOKENS + 1


def segment(start: int, stop: int, row_start: int, row_stop: int) -> Segment:
    return Segment(tuple(range(start, stop)), row_start, row_stop)


def shape(runs: tuple[LoRARun, ...]) -> list[tuple[int, int, int, int]]:
    return [(r.row_start, r.row_stop, r.width, len(r.own)) for r in runs]


def test_equal_neighbours_are_one_run_without_copies_however_long() -> None:
    for count in (1, 2, LONG):
        segments = [segment(2 + i * count, 2 + (i + 1) * count, 8 * i, 8 * i + 8) for i in range(3)]
        runs = bind_runs(segments[::-1], CPU)
        assert shape(runs) == [(0, 24, count, 3 * count)]
        assert runs[0].span == slice(2, 2 + 3 * count) and runs[0].places is None


def test_ranks_lengths_and_wide_gaps_start_another_run() -> None:
    ranks = [segment(0, 1, 0, 8), segment(1, 2, 8, 24)]
    lengths = [segment(0, 1, 0, 8), segment(1, 1 + LONG, 8, 16)]
    powers = [segment(0, 2, 0, 8), segment(2, 5, 8, 16)]
    gap = 8 + (MAX_IDLE_RANGES + 1) * 8
    gaps = [segment(0, 1, 0, 8), segment(1, 2, gap, gap + 8)]
    odd_gap = [segment(0, 1, 0, 16), segment(1, 2, 24, 40)]
    for segments in (ranks, lengths, powers, gaps, odd_gap):
        assert len(bind_runs(segments, CPU)) == 2


def test_an_adapters_width_is_its_own_business() -> None:
    """Whoever else is in the step, its products have one shape: their bits stay the same."""
    own = Segment((4, 9, 11), 8, 16)
    for others in ([], [segment(0, 4, 0, 8)], [segment(0, 1, 0, 8), segment(12, 14, 16, 24)]):
        widths = [run.width for run in bind_runs([own, *others], CPU) if 11 in run.own.tolist()]
        assert widths == [4]


def test_scattered_tokens_are_padded_and_every_one_has_its_place() -> None:
    segments = [Segment((7, 1, 4), 8, 16), Segment((0, 2, 3, 9), 24, 32), Segment((5, 6, 8), 0, 8)]
    (run,) = bind_runs(segments, CPU)
    assert (run.row_start, run.row_stop, run.width, run.span) == (0, 32, 4, None)
    assert run.places is not None
    assert run.own.tolist() == run.tokens[run.places].tolist() == [5, 6, 8, 7, 1, 4, 0, 2, 3, 9]
    assert (run.places // 4).tolist() == [0, 0, 0, 1, 1, 1, 3, 3, 3, 3]
