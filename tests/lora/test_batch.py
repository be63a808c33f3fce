"""Binding a step: long segments are spans, short neighbours share a run, padding is told apart."""

import torch

from engine.lora.batch import MAX_BLOCK_TOKENS, MAX_IDLE_BLOCKS, LoRABatch, Segment

CPU = torch.device("cpu")


def test_prompts_are_spans_and_decoding_is_one_run() -> None:
    many = MAX_BLOCK_TOKENS + 1
    segments = [
        Segment(2, 3, 0, 8),
        Segment(3, 3 + many, 8, 24),
        Segment(3 + many, 5 + many, 24, 32),
    ]
    batch = LoRABatch.bind(segments, CPU)
    assert [(s.start, s.stop, s.row_start, s.row_stop) for s in batch.spans] == [
        (3, 3 + many, 8, 24)
    ]
    (run,) = batch.blocks
    assert (run.row_start, run.row_stop, run.width) == (0, 32, 2)
    assert run.targets.tolist() == [2, 3 + many, 4 + many]


def test_a_wide_gap_starts_another_run() -> None:
    gap = (MAX_IDLE_BLOCKS + 1) * 8
    batch = LoRABatch.bind([Segment(0, 1, 0, 8), Segment(1, 2, 8 + gap, 16 + gap)], CPU)
    assert [(run.row_start, run.row_stop) for run in batch.blocks] == [(0, 8), (8 + gap, 16 + gap)]


def test_equal_counts_need_no_padding() -> None:
    (run,) = LoRABatch.bind([Segment(1, 3, 0, 8), Segment(3, 5, 8, 24)], CPU).blocks
    assert run.real is None
    assert run.tokens.tolist() == run.targets.tolist() == [1, 2, 3, 4, 3, 4]


def test_unequal_counts_mark_what_is_real() -> None:
    (run,) = LoRABatch.bind([Segment(0, 1, 0, 8), Segment(1, 4, 8, 16)], CPU).blocks
    assert run.real is not None
    assert run.real.tolist() == [0, 3, 4, 5]
    assert run.tokens[run.real].tolist() == run.targets.tolist() == [0, 1, 2, 3]
