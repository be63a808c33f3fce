"""linear_shrink and shrink: what plain torch gives, whatever the other tokens do."""

from typing import Any

import pytest
import torch
from lora_support import (
    DEVICE,
    FLOATS,
    MAX_ITEMS,
    POOL_ROWS,
    bits,
    make_tables,
    random,
    some_uses,
)

from engine.kernels import linear_shrink as module
from engine.kernels import linear_shrink_reference as reference
from engine.kernels.linear_shrink import LinearTile, Projected, linear_shrink, linear_tile
from engine.kernels.lora_shrink import (
    ShrinkWorkspace,
    shrink,
    shrink_workspace,
    shrink_workspace_bytes,
)
from engine.kernels.lora_tables import TILE, LoRATables, TokenUse

SMALL = LinearTile(outputs=16, inputs=32, planes=3, warps=4, stages=2)


def make_workspace(members: int, inputs: int, max_items: int = MAX_ITEMS) -> ShrinkWorkspace:
    """Of a card of 3 multiprocessors, so that programs have several units."""
    shapes = [(members, inputs)]
    return shrink_workspace(max_items=max_items, shapes=shapes, num_sms=3, device=DEVICE)


def inputs_of(
    tokens: int, outputs: int, inputs: int, members: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, a."""
    torch.manual_seed(tokens + outputs + inputs)
    x = random((tokens, inputs), dtype)
    weight = random((outputs, inputs), dtype, inputs**-0.5)
    return x, weight, random((POOL_ROWS, members, inputs), dtype, inputs**-0.5)


def assert_same(found: Projected, expected: Projected, tables: LoRATables | None) -> None:
    """Rounded once to the dtype, and sums of another order in float32."""
    y = found.y.float().sum(0)
    tolerance = 1e-5 if found.y.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(y, expected.y[0], atol=tolerance, rtol=tolerance)
    assert (found.h is None) == (expected.h is None)
    if found.h is not None and expected.h is not None and tables is not None:
        count = int(tables.blocks.starts[-1])
        assert found.h.shape == expected.h.shape and found.h.dtype is expected.h.dtype
        tolerance = 1e-5 if found.h.dtype is torch.float32 else 1e-2
        torch.testing.assert_close(
            found.h[:count], expected.h[:count], atol=tolerance, rtol=tolerance
        )


CASES = [  # tokens, outputs, inputs, members, tile
    (1, 48, 64, 3, SMALL),
    (16, 32, 96, 2, SMALL),
    (17, 40, 72, 2, SMALL),
    (33, 24, 2100, 1, LinearTile(16, 256, 2, 4, 3, shrink_first=True)),
    (5, 48, 4160, 3, LinearTile(32, 512, 8, 4, 3)),
    (3, 130, 700, 2, None),
    (70, 32, 2080, 2, None),
]


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "members", "tile"), CASES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_as_reference(
    tokens: int,
    outputs: int,
    inputs: int,
    members: int,
    tile: LinearTile | None,
    dtype: torch.dtype,
) -> None:
    x, weight, a = inputs_of(tokens, outputs, inputs, members, dtype)
    tables, workspace = make_tables(some_uses(tokens)), make_workspace(members, inputs)
    found = linear_shrink(x, weight, a, tables, workspace, tile=tile)
    assert_same(found, reference.linear_shrink(x, weight, a, tables), tables)
    again = linear_shrink(x, weight, a, tables, workspace, tile=tile)
    count = int(tables.blocks.starts[-1])
    assert found.h is not None and again.h is not None and count
    assert torch.equal(bits(found.y), bits(again.y))
    assert torch.equal(bits(found.h[:count]), bits(again.h[:count]))
    assert not workspace.counters.any()


@pytest.mark.parametrize("tokens", [3, 70])
def test_without_adapters(tokens: int) -> None:
    """No pool, no tables, tables without items: the same product."""
    x, weight, a = inputs_of(tokens, 40, 64, 2, torch.float32)
    workspace = make_workspace(2, 64)
    expected = reference.linear_shrink(x, weight, None, None)
    for pool, tables in ((None, None), (a, None), (None, make_tables([]))):
        assert_same(linear_shrink(x, weight, pool, tables, workspace), expected, None)
    found = linear_shrink(x, weight, a, make_tables([]), workspace)
    assert found.h is not None and found.h.shape == (MAX_ITEMS, 2, 16, 16)
    assert_same(Projected(found.y, None), expected, None)
    no_room = make_tables([], max_items=0)
    assert linear_shrink(x, weight, a, no_room, make_workspace(2, 64, 0)).h is not None


def test_strided_tokens() -> None:
    wide, weight, a = inputs_of(20, 24, 96, 1, torch.float32)
    x, weight, a = wide[:, 32:], weight[:, :64].contiguous(), a[:, :, :64].contiguous()
    tables, workspace = make_tables(some_uses(20)), make_workspace(1, 64)
    found = linear_shrink(x, weight, a, tables, workspace, tile=SMALL)
    assert_same(found, reference.linear_shrink(x, weight, a, tables), tables)


@pytest.mark.parametrize("inputs", [64, 2100])
def test_only_items_are_written(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beyond the count keeps its old values, and old tables there are not read."""
    x, weight, a = inputs_of(20, 16, inputs, 2, torch.float32)
    tables, workspace = make_tables(some_uses(20)), make_workspace(2, inputs)
    count = int(tables.blocks.starts[-1])
    tables.blocks.rows[count:] = 1 << 30
    tables.blocks.tiles[count:] = 1 << 30
    tables.blocks.weights[count:] = float("nan")
    old = x.new_full((MAX_ITEMS, 2, 16, 16), 7.0)
    monkeypatch.setattr(module, "new_h", lambda *_: old)
    found = linear_shrink(x, weight, a, tables, workspace, tile=SMALL)
    assert found.h is old and (old[count:] == 7).all() and not (old[:count] == 7).any()


@pytest.mark.parametrize("tile", [SMALL, None])
@pytest.mark.parametrize("tokens", [20, 70])
def test_tokens_do_not_touch_each_other(tokens: int, tile: LinearTile | None) -> None:
    """NaN and inf stay in their own row; a token's bits do not depend on the others' numbers,
    adapters or weights.
    """
    x, weight, a = inputs_of(tokens, 24, 2100, 2, torch.float32)
    workspace = make_workspace(2, 2100)
    own = [TokenUse(4, 32, 64, 0.5), TokenUse(18, 64, 80)]
    before = linear_shrink(x, weight, a, make_tables(own), workspace, tile=tile)
    sick = [token for token in range(tokens) if token not in (4, 18)]
    x[sick[::2]], x[sick[1::2]] = float("nan"), float("inf")
    others = [TokenUse(token, 0, 96, 3.0) for token in sick[::3]]
    tables = make_tables([*others, *own])
    after = linear_shrink(x, weight, a, tables, workspace, tile=tile)
    assert torch.equal(bits(before.y[:, [4, 18]]), bits(after.y[:, [4, 18]]))
    assert not after.y[:, sick].isfinite().any()
    assert before.h is not None and after.h is not None
    keys = list(zip(tables.blocks.tiles.tolist(), tables.blocks.rows.tolist(), strict=True))
    for item, (tile_number, row, token) in enumerate([(0, 32, 4), (0, 48, 4), (1, 64, 18)]):
        mine = after.h[keys.index((tile_number, row)), :, token % TILE]
        assert torch.equal(bits(before.h[item, :, token % TILE]), bits(mine))
    for item in range(int(tables.blocks.starts[-1])):
        unused = tables.blocks.weights[item] == 0
        assert (after.h[item][:, unused] == 0).all()  # a weight of 0 takes nothing, not even NaN


def test_shrink_alone() -> None:
    x, weight, a = inputs_of(70, 16, 2100, 3, torch.float32)
    tables, workspace = make_tables(some_uses(70)), make_workspace(3, 2100)
    beside = linear_shrink(x, weight, a, tables, workspace, tile=SMALL).h
    count = int(tables.blocks.starts[-1])
    alone = shrink(x, a, tables, workspace)[:count]
    assert beside is not None
    torch.testing.assert_close(alone, beside[:count], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, reference.shrink(x, a, tables.blocks)[:count])


def test_expanded_reference() -> None:
    """Against token by token sums over `uses`, which know no tiles, items or planes."""
    torch.manual_seed(0)
    tokens, inputs, widths = 37, 24, (16, 8, 8)
    x, weight, a = inputs_of(tokens, sum(widths), inputs, len(widths), torch.float32)
    b, bias = random((POOL_ROWS, sum(widths)), torch.float32), random([32], torch.float32)
    uses = [
        *some_uses(tokens),
        TokenUse(3, 0, 16, 0.5, gain_row=100, bias_row=101),
        TokenUse(36, 0, 0, -1.5, gain_row=102),
        TokenUse(36, 0, 0, 2.0, bias_row=101),
    ]
    tables = make_tables(uses)
    value = x @ weight.t() + bias
    for use in uses:
        token, start, stop = use.token, use.row_start, use.row_stop
        parts = torch.split(b[start:stop], list(widths), dim=1)
        deltas = [a[start:stop, member] @ x[token] @ part for member, part in enumerate(parts)]
        value[token] += use.weight * torch.cat(deltas)
        if use.gain_row is not None:
            value[token] += use.weight * b[use.gain_row] * (x[token] @ weight.t())
        if use.bias_row is not None:
            value[token] += use.weight * b[use.bias_row]
    whole = reference.linear_shrink(x, weight, a, tables)
    thirds = Projected(torch.cat([whole.y * 0.25, whole.y * 0.25, whole.y * 0.5]), whole.h)
    for projected in (whole, thirds):
        found = reference.expanded_reference(projected, b, tables, bias, widths)
        torch.testing.assert_close(found, value, atol=1e-4, rtol=1e-4)
    base = reference.expanded_reference(whole, None, None, None, widths)
    assert torch.equal(base, whole.y[0])
    plain = reference.expanded_reference(Projected(whole.y, None), b, tables, bias, widths)
    untouched = sorted(set(range(tokens)) - {use.token for use in uses})
    assert torch.equal(plain[untouched], (whole.y[0] + bias)[untouched])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(0, 64)}, r"x is .*\(0, 64\)"),
    ({"x": torch.zeros(64, 4).t()}, "x is"),
    ({"x": torch.zeros(4, 64, dtype=torch.float64)}, "x and weight are"),
    ({"weight": torch.zeros(8, 65)}, r"weight is .*\(8, 65\).*with I 64"),
    ({"weight": torch.zeros(8, 64, dtype=torch.float16)}, "x and weight are"),
    ({"weight": torch.zeros(64, 8).t()}, "weight is"),
    ({"a": torch.zeros(32, 64)}, r"a is .*\(32, 64\)"),
    ({"a": torch.zeros(32, 2, 64, dtype=torch.float16)}, "x and a are"),
    ({"a": torch.zeros(32, 2, 64, device="meta")}, "a is on meta"),
    ({"x": torch.zeros(97, 64)}, "x has 97 tokens, expected 96"),
    ({"x": torch.zeros(4, 2100), "weight": torch.zeros(8, 2100)}, r"a is .*with I 2100"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    x, weight, a = inputs_of(4, 8, 64, 2, torch.float32)
    given = {"x": x, "weight": weight, "a": a}
    for name, tensor in change.items():
        given[name] = tensor if tensor.is_meta else tensor.to(DEVICE)
    with pytest.raises(ValueError, match=message):
        linear_shrink(**given, tables=make_tables([]), workspace=make_workspace(2, 64))


def test_workspace() -> None:
    """One for several projections holds the largest; one for too few items is refused."""
    shapes = [(3, 4096), (1, 14336), (2, 512)]
    space = shrink_workspace(max_items=5, shapes=shapes, num_sms=3, device=DEVICE)
    total = 4 * (space.partials.numel() + space.counters.numel())
    assert shrink_workspace_bytes(max_items=5, shapes=shapes) == total
    assert shrink_workspace_bytes(max_items=5, shapes=[(3, 512)]) == 0
    x, weight, a = inputs_of(4, 8, 2100, 2, torch.float32)
    with pytest.raises(ValueError, match="workspace has"):
        linear_shrink(x, weight, a, make_tables([]), make_workspace(2, 2100, MAX_ITEMS - 1))


@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 32, 64])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(6144, 4096), (4096, 4096), (28672, 4096), (24576, 4096), (4096, 14336), (128256, 4096)],
)
def test_tiles_of_large_shapes(tokens: int, outputs: int, inputs: int) -> None:
    """Enough programs to fill the card, few enough planes to be cheap beside the weight."""
    tile = linear_tile(tokens, outputs, inputs, torch.bfloat16, 132)
    blocks = -(-outputs // tile.outputs)
    assert blocks * tile.planes >= 90
    assert tile.planes == 1 or blocks * tile.planes <= 2 * 132
    written = tile.planes * tokens * outputs * 4
    assert written <= outputs * inputs * 2 // 4


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 31, 64, 128])
@pytest.mark.parametrize(
    ("outputs", "inputs", "members"),
    [(6144, 4096, 3), (4096, 4096, 1), (28672, 4096, 2), (4096, 14336, 1)],
)
@pytest.mark.parametrize("early", [False, True])
def test_real_shapes_in_a_graph(
    tokens: int, outputs: int, inputs: int, members: int, early: bool
) -> None:
    """One captured graph, replayed with the tables of other batches and the counters as left."""
    x, weight, a = inputs_of(tokens, outputs, inputs, members, torch.bfloat16)
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    tables = make_tables([], 128, 256)
    workspace = shrink_workspace(
        max_items=256, shapes=[(members, inputs)], num_sms=num_sms, device=DEVICE
    )
    source = x.clone()

    def step() -> Projected:
        torch.add(source, 0, out=x)  # the kernel before
        return linear_shrink(x, weight, a, tables, workspace, early=early)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for uses in (
        [],
        some_uses(tokens),
        [TokenUse(t, 16 * (t % 10), 16 * (t % 10) + 16) for t in range(tokens)],
        [],
    ):
        source.copy_(random(x.shape, torch.bfloat16))
        tables.copy_from(make_tables(uses, 128, 256))
        x.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert_same(found, reference.linear_shrink(x, weight, a, tables), tables)
        assert torch.equal(x, source) and not workspace.counters.any()
