"""Cutting a step into tiles: the cut is the cheapest of all, masks keep adapters apart."""

from itertools import combinations, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.lora.batch import TILE_COST, LoRABatch, Segment, cheapest_cuts


def segments_of(counts: list[int], rows: list[int], gaps: list[int]) -> tuple[Segment, ...]:
    token, row, result = 2, 0, []
    for count, height, gap in zip(counts, rows, gaps, strict=True):
        row += gap
        result.append(Segment(token, token + count, row, row + height))
        token, row = token + count, row + height
    return tuple(result)


def cost(segments: tuple[Segment, ...], runs: list[tuple[int, int]]) -> int:
    return sum(
        TILE_COST
        + (segments[j - 1].stop - segments[i].start)
        * (segments[j - 1].row_stop - segments[i].row_start)
        for i, j in runs
    )


many = st.lists(
    st.tuples(st.integers(1, 20), st.sampled_from([8, 16, 64]), st.sampled_from([0, 8, 64])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(many)
def test_no_cut_is_cheaper(shape: list[tuple[int, int, int]]) -> None:
    segments = segments_of(*map(list, zip(*shape, strict=True)))
    found = cheapest_cuts(segments)
    assert [i for i, _ in found] == [0, *[j for _, j in found][:-1]] and found[-1][1] == len(
        segments
    )
    n = len(segments)
    for k in range(n):
        for inner in combinations(range(1, n), k):
            edges = [0, *inner, n]
            assert cost(segments, found) <= cost(segments, list(pairwise(edges)))


def test_one_row_each_is_merged_and_long_prompts_are_not() -> None:
    decode = segments_of([1] * 4, [8] * 4, [0] * 4)
    assert len(cheapest_cuts(decode)) == 1
    prefill = segments_of([200] * 4, [8] * 4, [0] * 4)
    assert len(cheapest_cuts(prefill)) == 4


def test_masks_are_one_on_the_own_rows_only() -> None:
    segments = segments_of([2, 1], [8, 16], [0, 8])
    (tile,) = LoRABatch.bind(segments, torch.float32, torch.device("cpu")).tiles
    assert (tile.start, tile.stop, tile.row_start, tile.row_stop) == (2, 5, 0, 32)
    assert tile.mask is not None
    expected = torch.zeros(3, 32)
    expected[:2, :8] = 1
    expected[2, 16:] = 1
    assert torch.equal(tile.mask, expected)
