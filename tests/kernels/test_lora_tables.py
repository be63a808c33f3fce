"""lora_tables: what the tables say is what a naive list of (token, row, weight) says."""

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.lora_tables import BLOCK, TILE, Items, LoRATables, TokenUse

CPU = torch.device("cpu")
MAX_TOKENS, MAX_BLOCKS, MAX_VECTORS = 44, 400, 60
Weights = dict[tuple[int, int], float]

# Weights that add up exactly in any order.
weights = st.sampled_from([1.0, 0.5, -0.25, 2.0, -2.0, 0.0])
uses = st.builds(
    lambda span, block, blocks, weight, gain_row, bias_row: TokenUse(
        span[0], block * BLOCK, (block + blocks) * BLOCK, weight, gain_row, bias_row, span[1]
    ),
    st.integers(0, MAX_TOKENS - 1).flatmap(
        lambda token: st.tuples(st.just(token), st.integers(1, MAX_TOKENS - token))
    ),
    st.integers(0, 6),
    st.integers(0, 3),
    weights,
    st.none() | st.integers(0, 5),
    st.none() | st.integers(0, 5),
)


def empty() -> LoRATables:
    return LoRATables.empty(MAX_TOKENS, MAX_BLOCKS, MAX_VECTORS, CPU)


def expected(found: list[TokenUse], rows: Callable[[TokenUse], list[int]]) -> Weights:
    """Sum of weights by (token, row); tokens of a tile that do not use a row have weight 0."""
    sums: Weights = defaultdict(float)
    for use in found:
        own = range(use.token, use.token + use.num_tokens)
        for row in rows(use):
            for token in range(own[0] // TILE * TILE, own[-1] // TILE * TILE + TILE):
                sums[token, row] += use.weight if token in own else 0.0
    return dict(sums)


def told(items: Items) -> Weights:
    """The same from the tables, read tile by tile as kernels do."""
    sums: Weights = {}
    assert items.starts[0] == 0
    for tile, (start, stop) in enumerate(zip(items.starts[:-1], items.starts[1:], strict=True)):
        rows = items.rows[start:stop].tolist()
        assert rows == sorted(set(rows))
        assert items.tiles[start:stop].tolist() == [tile] * len(rows)
        for row, row_weights in zip(rows, items.weights[start:stop], strict=True):
            for place, weight in enumerate(row_weights.tolist()):
                sums[tile * TILE + place, row] = weight
    return sums


def check(tables: LoRATables, found: list[TokenUse]) -> None:
    assert told(tables.blocks) == expected(
        found, lambda use: list(range(use.row_start, use.row_stop, BLOCK))
    )
    assert told(tables.gains) == expected(
        found, lambda use: [] if use.gain_row is None else [use.gain_row]
    )
    assert told(tables.biases) == expected(
        found, lambda use: [] if use.bias_row is None else [use.bias_row]
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(uses, max_size=30), st.lists(uses, max_size=30))
def test_tables_say_what_uses_say(first: list[TokenUse], second: list[TokenUse]) -> None:
    """A second filling leaves nothing of the first; a copy by its one tensor says the same."""
    host, device = empty(), empty()
    for found in (first, second):
        host.fill(found)
        check(host, found)
        device.copy_from(host)
        check(device, found)
        exact = LoRATables.of(found, MAX_TOKENS, CPU)
        check(exact, found)
        assert exact.blocks.max_items == int(exact.blocks.starts[-1])


def test_no_uses() -> None:
    tables = empty()
    tables.fill([])
    for items in (tables.blocks, tables.gains, tables.biases):
        assert not items.starts.any() and told(items) == {}


@pytest.mark.parametrize("limit", ["blocks", "gains", "biases"])
def test_limits(limit: str) -> None:
    """As many items as there is room for, and not one more."""
    tables = LoRATables.empty(32, 3, 2, CPU)
    uses = {
        "blocks": [TokenUse(0, 0, 32), TokenUse(16, 0, 16)],
        "gains": [TokenUse(0, 0, 0, gain_row=1), TokenUse(31, 0, 0, gain_row=1)],
        "biases": [TokenUse(0, 0, 0, bias_row=1), TokenUse(31, 0, 0, bias_row=1)],
    }[limit]
    tables.fill(uses)
    assert int(getattr(tables, limit).starts[-1]) == {"blocks": 3}.get(limit, 2)
    more = {
        "blocks": TokenUse(1, 80, 96),
        "gains": TokenUse(1, 0, 0, gain_row=2),
        "biases": TokenUse(1, 0, 0, bias_row=2),
    }[limit]
    count = {"blocks": 4}.get(limit, 3)
    with pytest.raises(ValueError, match=f"{count} items, the tables hold {count - 1}"):
        tables.fill([*uses, more])


def test_one_address() -> None:
    """All views lie in `packed`, one after the other, each at a multiple of 16 bytes."""
    tables = LoRATables.empty(44, 5, 3, CPU)
    parts = [
        part
        for items in (tables.blocks, tables.gains, tables.biases)
        for part in (items.starts, items.tiles, items.rows, items.weights)
    ]
    place = 0
    for part in parts:
        assert part.data_ptr() == tables.packed.data_ptr() + place and part.is_contiguous()
        place += -(-part.numel() // 4) * 16
    assert place == tables.packed.numel() * 4
    assert not tables.packed.any()
