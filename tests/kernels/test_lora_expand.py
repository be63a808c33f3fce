"""expand_add: what plain torch gives, in place, whatever the other tokens do."""

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

from engine.kernels import linear_shrink_reference as reference
from engine.kernels.lora_expand import expand_add
from engine.kernels.lora_shrink import shrink, shrink_workspace
from engine.kernels.lora_tables import BLOCK, TILE, LoRATables, TokenUse

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
QKV, GATE_UP = (4096, 1024, 1024), (14336, 14336)


def vector_uses(tokens: int) -> list[TokenUse]:
    """Gains and biases with blocks and without, two of each on one token, negative weights."""
    return [
        TokenUse(0, 96, 112, 0.5, gain_row=100, bias_row=101),
        TokenUse(0, 0, 0, -1.5, gain_row=102),
        TokenUse(tokens - 1, 0, 0, 2.0, gain_row=100),
        TokenUse(tokens - 1, 0, 0, -0.5, bias_row=101),
        TokenUse(tokens // 2, 0, 0, bias_row=103),
    ]


def made(tokens: int, widths: tuple[int, ...], tables: LoRATables, dtype: torch.dtype) -> Tensors:
    """y, h, b; h as the shrink would make it, of any numbers, and NaN where it writes nothing."""
    torch.manual_seed(tokens + sum(widths))
    items = tables.blocks
    h = random((items.max_items, len(widths), TILE, BLOCK), dtype, 0.25)
    count = int(items.starts[-1])
    h[:count] *= items.weights[:count, None, :, None].to(dtype)
    h[count:] = float("nan")
    return random((tokens, sum(widths)), dtype), h, random((POOL_ROWS, sum(widths)), dtype)


def base_tokens(tokens: int, uses: list[TokenUse]) -> list[int]:
    return sorted(set(range(tokens)) - {use.token for use in uses})


CASES: list[tuple[int, tuple[int, ...]]] = [
    (1, (64, 32, 32)),
    (8, (128,)),
    (16, (64, 32, 32)),
    (17, (40, 8)),
    (40, (32, 96, 32)),
    (33, (5, 70, 1)),
]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "widths"), CASES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16])
def test_same_as_reference(
    tokens: int, widths: tuple[int, ...], with_bias: bool, dtype: torch.dtype
) -> None:
    uses = [*some_uses(tokens), TokenUse(tokens - 1, 64, 128, -0.75), *vector_uses(tokens)]
    tables = make_tables(uses)
    y, h, b = made(tokens, widths, tables, dtype)
    base_bias = random([sum(widths)], dtype) if with_bias else None
    found, again, expected = y.clone(), y.clone(), y.clone()
    expand_add(found, h, b, tables, widths, base_bias)
    expand_add(again, h, b, tables, widths, base_bias)
    reference.expand_add(expected, h, b, tables, widths, base_bias)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(bits(found), bits(again))
    base = base_tokens(tokens, uses)
    assert torch.equal(bits(found[base]), bits(y[base]))


def test_token_by_token() -> None:
    """Behind the real shrink, against sums over `uses`, which know no tiles and items."""
    torch.manual_seed(0)
    tokens, inputs, widths = 20, 32, (64, 32, 32)
    uses = [*some_uses(tokens), *vector_uses(tokens)]
    tables = make_tables(uses)
    x = random((tokens, inputs), torch.float32)
    a = random((POOL_ROWS, len(widths), inputs), torch.float32, inputs**-0.5)
    b = random((POOL_ROWS, sum(widths)), torch.float32)
    z, base_bias = random((tokens, sum(widths)), torch.float32), random([128], torch.float32)
    value = z + base_bias
    y = value.clone()
    for use in uses:
        token, own = use.token, slice(use.row_start, use.row_stop)
        parts = torch.split(b[own], list(widths), dim=1)
        delta = torch.cat([a[own, m] @ x[token] @ part for m, part in enumerate(parts)])
        if use.gain_row is not None:
            delta += b[use.gain_row] * z[token]
        if use.bias_row is not None:
            delta += b[use.bias_row]
        value[token] += use.weight * delta
    shapes = [(len(widths), inputs)]
    space = shrink_workspace(max_items=MAX_ITEMS, shapes=shapes, num_sms=3, device=DEVICE)
    expand_add(y, shrink(x, a, tables, space), b, tables, widths, base_bias)
    torch.testing.assert_close(y, value, atol=1e-4, rtol=1e-4)


def test_more_items_than_a_group() -> None:
    """A tile with 70 items, each of another token and of the one that uses them all."""
    uses = [TokenUse(3, 0, 1120, 0.5)]
    uses += [TokenUse(4 + item % 12, 16 * item, 16 * item + 16, -1.0) for item in range(70)]
    tables = make_tables(uses, max_items=70)
    y, h, _ = made(16, (64,), tables, torch.float32)
    b = random((1120, 64), torch.float32)
    expected = y.clone()
    before = y[:3].clone()
    reference.expand_add(expected, h, b, tables, (64,), None)
    expand_add(y, h, b, tables, (64,), None)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(bits(y[:3]), bits(before))


@pytest.mark.parametrize("uses", [[], [TokenUse(2, 0, 32)]])
def test_nothing_to_add(uses: list[TokenUse]) -> None:
    """No items, or only blocks and no h: not a bit changes, not even of -0 and NaN."""
    tables = make_tables(uses)
    y, h, b = made(20, (64, 32), tables, torch.float32)
    y[2], y[3] = -0.0, float("nan")
    before = y.clone()
    expand_add(y, None if uses else h, b, tables, (64, 32), None)
    assert torch.equal(bits(y), bits(before))
    none = make_tables([], max_items=0)
    expand_add(y, h[:0], b, none, (64, 32), None)
    assert torch.equal(bits(y), bits(before))


def test_vectors_without_h() -> None:
    uses = [*some_uses(20), *vector_uses(20)]
    tables = make_tables(uses)
    y, _, b = made(20, (64, 32), tables, torch.float32)
    expected, before = y.clone(), y.clone()
    reference.expand_add(expected, None, b, tables, (64, 32), b[0])
    expand_add(y, None, b, tables, (64, 32), b[0])
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(bits(y[2]), bits(before[2]))  # has only blocks


def test_wider_output() -> None:
    """y in float32 with a pool in bfloat16, and rows of y that lie apart."""
    uses = [*some_uses(20), *vector_uses(20)]
    tables = make_tables(uses)
    _, h, b = made(20, (64, 32), tables, torch.bfloat16)
    whole = random((20, 160), torch.float32)
    before, expected = whole.clone(), whole[:, 32:128].clone()
    reference.expand_add(expected, h, b, tables, (64, 32), b[0])
    expand_add(whole[:, 32:128], h, b, tables, (64, 32), b[0])
    torch.testing.assert_close(whole[:, 32:128], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(whole[:, :32], before[:, :32])
    assert torch.equal(whole[:, 128:], before[:, 128:])


def test_tokens_do_not_touch_each_other() -> None:
    """A token's bits do not depend on the others' numbers, adapters or weights: NaN and inf in
    their y, their h and their adapters' rows stay with them.
    """
    widths = (64, 32)
    own = [
        TokenUse(4, 32, 64, 0.5, gain_row=100),
        TokenUse(18, 64, 80, bias_row=101),
        TokenUse(18, 112, 128, -1.0),
    ]
    alone = make_tables(own)
    y, h, b = made(24, widths, alone, torch.float32)
    before = y.clone()
    expand_add(before, h, b, alone, widths, None)
    sick = [token for token in range(24) if token not in (4, 18)]
    others = [TokenUse(token, 0, 112, 3.0, 102, 103) for token in sick[::3]]
    tables = make_tables([*others, *own])
    keys = list(zip(tables.blocks.tiles.tolist(), tables.blocks.rows.tolist(), strict=True))
    mixed = torch.full_like(h, float("nan"))
    for item, (tile, row, token) in enumerate([(0, 32, 4), (0, 48, 4), (1, 64, 18), (1, 112, 18)]):
        mixed[keys.index((tile, row)), :, token % TILE] = h[item, :, token % TILE]
    b[:32], b[80:96], b[102:104] = float("nan"), float("inf"), float("nan")
    y[sick[::3]] = float("inf")
    after = y.clone()
    expand_add(after, mixed, b, tables, widths, None)
    assert torch.equal(bits(before[[4, 18]]), bits(after[[4, 18]]))
    untouched = [token for token in sick if token not in sick[::3]]
    assert torch.equal(bits(y[untouched]), bits(after[untouched]))
    assert after[sick[::3]].isnan().all()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"y": torch.zeros(0, 96)}, r"y is .*\(0, 96\)"),
    ({"y": torch.zeros(96, 4).t()}, r"y is .*\(4, 96\), strides \(1, 4\)"),
    ({"y": torch.zeros(1, 96).expand(4, 96)}, r"y is .*\(4, 96\), strides \(0, 1\)"),
    ({"y": torch.zeros(4, 96, dtype=torch.float64)}, "y is torch.float64"),
    ({"y": torch.zeros(97, 96)}, "y has 97 tokens, expected 96"),
    ({"h": torch.zeros(MAX_ITEMS, 3, 16, 16)}, r"h is .*expected .*\(32, 2, 16, 16\)"),
    ({"h": torch.zeros(MAX_ITEMS, 2, 16, 16, dtype=torch.float16)}, "h is torch.float16"),
    ({"h": torch.zeros(MAX_ITEMS, 2, 16, 32)[..., ::2]}, "h is"),
    ({"b": torch.zeros(32, 95)}, r"b is .*\(32, 95\).*with O 96"),
    ({"b": torch.zeros(96, 32).t()}, "b is"),
    ({"b": torch.zeros(32, 96, device="meta")}, "b is on meta"),
    ({"b": torch.zeros(32, 96, dtype=torch.int32), "h": None}, "b is torch.int32"),
    ({"widths": (64, 33)}, r"widths is \(64, 33\).*together 96"),
    ({"widths": (97, -1)}, "widths is"),
    ({"base_bias": torch.zeros(95)}, r"base_bias is .*\(95,\)"),
    ({"base_bias": torch.zeros(192)[::2]}, "base_bias is"),
    ({"tables": LoRATables.empty(96, MAX_ITEMS, 8, torch.device("meta"))}, "tables are on meta"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    tables = make_tables([])
    y, h, b = made(4, (64, 32), tables, torch.float32)
    given: dict[str, Any] = {"y": y, "h": h, "b": b, "tables": tables}
    given |= {"widths": (64, 32), "base_bias": None}
    for name, value in change.items():
        movable = isinstance(value, torch.Tensor) and not value.is_meta and value.stride(0)
        given[name] = value.to(DEVICE) if movable else value
    with pytest.raises(ValueError, match=message):
        expand_add(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 31, 64])
@pytest.mark.parametrize("widths", [QKV, (4096,), GATE_UP, (14336, 14335)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_real_shapes_in_a_graph(tokens: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    """One captured graph, replayed with the tables of other batches."""
    tables = make_tables([], 64, 256)
    y, h, b = made(tokens, widths, tables, dtype)
    base_bias, source = random([sum(widths)], dtype), y.clone()

    def step() -> None:
        y.copy_(source)
        expand_add(y, h, b, tables, widths, base_bias)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ranks = [TokenUse(t, 16 * (t % 7), 16 * (t % 7) + (16, 32, 64)[t % 3]) for t in range(tokens)]
    for uses in ([], [*some_uses(tokens), *vector_uses(tokens)], ranks, []):
        tables.copy_from(make_tables(uses, 64, 256))
        h.copy_(made(tokens, widths, tables, dtype)[1])
        expected = source.clone()
        reference.expand_add(expected, h, b, tables, widths, base_bias)
        results = []
        for _ in range(2):
            graph.replay()
            results.append(y.clone())
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(results[0], expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(bits(results[0]), bits(results[1]))
        base = base_tokens(tokens, uses)
        assert torch.equal(bits(results[0][base]), bits(source[base]))
