"""LoRA over the rank pool against one adapter at a time, for random tilings of the batch."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.lora import LoRATile, add_lora

WIDTHS = (12, 4, 4)
IN = 10


def masked_tile(owners: list[tuple[int, int]], start: int, stop: int) -> LoRATile:
    """A tile over tokens start..stop whose owners are (row_start, row_stop) per token."""
    own = owners[start:stop]
    low, high = min(row for row, _ in own), max(row for _, row in own)
    mask = torch.zeros(stop - start, high - low)
    for token, (row_start, row_stop) in enumerate(own):
        mask[token, row_start - low : row_stop - low] = 1
    return LoRATile(start, stop, low, high, mask)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tiling_equals_one_by_one(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from([8, 16, 24]), min_size=1, max_size=4))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ranges = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    num_base = data.draw(st.integers(0, 3))
    counts = data.draw(st.lists(st.integers(1, 4), min_size=len(ranges), max_size=len(ranges)))
    owners = [own for own, count in zip(ranges, counts, strict=True) for _ in range(count)]
    total = num_base + len(owners)
    cuts = data.draw(st.sets(st.integers(1, max(1, len(owners) - 1))))
    edges = [0, *sorted(cut for cut in cuts if cut < len(owners)), len(owners)]

    torch.manual_seed(total)
    a, b = torch.randn(3, sum(lengths), IN), torch.randn(sum(lengths), sum(WIDTHS))
    x, y = torch.randn(total, IN), torch.randn(total, sum(WIDTHS))
    expected = y.double()
    for token, (row_start, row_stop) in enumerate(owners, start=num_base):
        column = 0
        for member, width in enumerate(WIDTHS):
            h = a[member, row_start:row_stop].double() @ x[token].double()
            delta = h @ b[row_start:row_stop, column : column + width].double()
            expected[token, column : column + width] += delta
            column += width

    base = [(0, 0)] * num_base
    tiles = tuple(
        masked_tile(base + owners, num_base + low, num_base + high)
        for low, high in pairwise(edges)
        if high > low
    )
    untouched = y[:num_base].clone()
    add_lora(x, y, a, b, WIDTHS, tiles)
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(y[:num_base], untouched)
