"""prefill_attention: what plain torch gives, whatever the other rows and the unused pages hold."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine.kernels import attention_reference as reference
from engine.kernels.prefill_attention import PrefillTile, prefill_attention, prefill_tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = PrefillTile(queries=16, keys=16, warps=4, stages=2)
FLOATS = [torch.float32, torch.bfloat16]
CHUNKS = [(7, 0), (1, 20), (0, 0), (19, 3), (1, 0), (2, 14)]  # new tokens, cached ones


@dataclass(frozen=True)
class Given:
    """Arguments of prefill_attention. Unused pages and tokens are NaN, page numbers that no token
    needs are far outside of the cache.
    """

    q: torch.Tensor
    cache: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    max_query: int
    scale: float
    window: int | None

    def arguments(self) -> dict[str, Any]:
        return dict(self.__dict__)


def make(
    chunks: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 4,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Given:
    torch.manual_seed(sum(new + 3 * cached for new, cached in chunks))
    new = torch.tensor([row[0] for row in chunks])
    lengths = new + torch.tensor([row[1] for row in chunks])
    used = (-(-lengths // page_size)).tolist()
    num_pages = sum(used) + 3
    numbers = torch.randperm(num_pages)
    cache = torch.full((2, num_pages, kv_heads, page_size, head_dim), float("nan"))
    table = torch.full((len(chunks), max(used) + 1), 1 << 30, dtype=torch.int32)
    begin = 0
    for row, (length, pages) in enumerate(zip(lengths.tolist(), used, strict=True)):
        own = numbers[begin : begin + pages]
        table[row, :pages], begin = own, begin + pages
        data = torch.randn(2, kv_heads, pages * page_size, head_dim)
        data[:, :, length:] = float("nan")
        cache[:, own] = data.unflatten(2, (-1, page_size)).transpose(1, 2)
    starts = torch.zeros(len(chunks) + 1, dtype=torch.int32)
    starts[1:] = new.cumsum(0)
    return Given(
        torch.randn(int(starts[-1]), heads, head_dim).to(DEVICE, dtype),
        cache.to(DEVICE, dtype),
        table.to(DEVICE),
        starts.to(DEVICE),
        lengths.int().to(DEVICE),
        int(new.max()),
        head_dim**-0.5,
        window,
    )


def assert_same(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-5) -> None:
    """bfloat16 rounds the weights of the values before, and the result after their sum."""
    assert found.shape == expected.shape and found.dtype is expected.dtype
    tolerance = error if found.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check(given: Given, tile: PrefillTile | None = None, error: float = 1e-5) -> torch.Tensor:
    found = prefill_attention(**given.arguments(), tile=tile)
    assert_same(found, reference.prefill_attention(**given.arguments()), error)
    return found


@pytest.mark.parametrize("window", [None, 1, 5, 18])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_different_lengths(dtype: torch.dtype, page_size: int, window: int | None) -> None:
    """Chunks with and without a prefix, of 1 token, empty, whose ends are and are not a tile's."""
    check(make(CHUNKS, page_size=page_size, window=window, dtype=dtype), SMALL)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("window", [None, 6])
def test_groups(group: int, window: int | None) -> None:
    """A group that is no power of two, or has more heads than a program has pairs, too."""
    check(make([(5, 3), (9, 0), (1, 7)], heads=2 * group, window=window), SMALL)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", FLOATS)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(make([(7, 30), (18, 0)], heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize("window", [None, 70])
def test_tiles_of_real_size(page_size: int, window: int | None) -> None:
    chunks = [(70, 75), (33, 100)]
    tile = prefill_tile(64, torch.bfloat16)
    check(make(chunks, heads=4, kv_heads=1, page_size=page_size, window=window), tile)


@pytest.mark.parametrize("window", [None, 5])
def test_rows_do_not_touch_each_other(window: int | None) -> None:
    """A row's bits are the same alone, among others, and among others full of NaN."""
    given = make(CHUNKS, window=window)
    among = check(given, SMALL)
    starts = given.query_starts.tolist()
    for row in (0, 3, 5):
        own = slice(starts[row], starts[row + 1])
        single = replace(
            given,
            q=given.q[own],
            page_table=given.page_table[row : row + 1],
            query_starts=torch.tensor([0, own.stop - own.start], dtype=torch.int32, device=DEVICE),
            lengths=given.lengths[row : row + 1],
            max_query=own.stop - own.start,
        )
        alone = prefill_attention(**single.arguments(), tile=SMALL)
        assert torch.equal(bits(alone), bits(among[own]))
        sick_q, sick = torch.full_like(given.q, float("nan")), given.cache.clone()
        sick_q[own] = given.q[own]
        pages = given.page_table[row, : -(-int(given.lengths[row]) // 4)].long()
        sick[:] = float("nan")
        sick[:, pages] = given.cache[:, pages]
        beside = prefill_attention(**replace(given, q=sick_q, cache=sick).arguments(), tile=SMALL)
        assert torch.equal(bits(beside[own]), bits(among[own]))


def test_keys_before_the_window_are_not_read() -> None:
    """Their pages may belong to others by now."""
    given = make([(6, 30)], window=9)
    expected = prefill_attention(**given.arguments(), tile=SMALL)
    oldest = 30 - 9 + 1
    given.page_table[0, : oldest // 4] = 1 << 30
    given.cache[:, given.page_table[0, oldest // 4], :, : oldest % 4] = float("nan")
    found = prefill_attention(**given.arguments(), tile=SMALL)
    assert torch.equal(bits(found), bits(expected)) and found.isfinite().all()


def test_chunks_in_turn_are_the_whole() -> None:
    whole = make([(40, 0)])
    expected = prefill_attention(**whole.arguments(), tile=SMALL)
    for start, stop in ((0, 13), (13, 14), (14, 40)):
        chunk = replace(
            whole,
            q=whole.q[start:stop],
            query_starts=torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE),
            lengths=torch.tensor([stop], dtype=torch.int32, device=DEVICE),
            max_query=stop - start,
        )
        assert_same(prefill_attention(**chunk.arguments(), tile=SMALL), expected[start:stop])


def test_strides_and_unused_tokens() -> None:
    """q as a slice of a fused projection, padded tokens after the last row's, a wider table."""
    given = make([(5, 2), (8, 0)])
    expected = reference.prefill_attention(**given.arguments())
    wide = given.q.new_full((16, 8, 64), float("nan"))
    wide[:13, 2:6] = given.q
    table = torch.full((2, 9), 1 << 30, dtype=torch.int32, device=DEVICE)
    table[:, : given.page_table.shape[1]] = given.page_table
    changed = replace(given, q=wide[:, 2:6], page_table=table[:, :7], max_query=16)
    found = prefill_attention(**changed.arguments(), tile=SMALL)
    assert found.shape == (16, 256)
    assert_same(found[:13], expected)


def test_nothing_to_do() -> None:
    given = make([(0, 4), (0, 0)])
    assert prefill_attention(**given.arguments()).shape == (0, 256)
    none = replace(
        given,
        page_table=given.page_table[:0],
        lengths=given.lengths[:0],
        query_starts=given.query_starts[:1],
    )
    assert prefill_attention(**none.arguments()).shape == (0, 256)


def test_large_scores() -> None:
    """Far below zero and far apart: neither 0 / 0 nor an overflow. Those of whole numbers are
    exact.
    """
    given = make([(20, 5)])
    given.cache.round_()
    check(replace(given, q=(given.q * 300).round()), SMALL, error=1e-3)
    given.cache[0] = (-given.q[0, 0].abs() * 400).round()
    check(replace(given, q=(given.q.abs() * 100).round()), SMALL, error=1e-3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(12, 4, 72)}, "head_dim 72, expected one of"),
    ({"q": torch.zeros(12, 3, 64)}, "q is 3 heads"),
    ({"q": torch.zeros(12, 64)}, r"q is .*\(12, 64\)"),
    ({"q": torch.zeros(12, 4, 64, dtype=torch.float64)}, "q is torch.float64"),
    ({"q": torch.zeros(12, 4, 64, dtype=torch.bfloat16)}, "cache is torch.float32"),
    ({"page_table": torch.zeros(2, 5).long()}, "page_table is torch.int64"),
    ({"page_table": torch.zeros(3, 5).int()}, r"page_table is \(3, 5\), expected \[2"),
    ({"lengths": torch.zeros(4).int()[::2]}, "lengths is"),
    ({"lengths": torch.zeros(2, device="meta").int()}, "device of q"),
    ({"query_starts": torch.zeros(2).int()}, r"query_starts is .* \(2,\), expected .* \(3,\)"),
    ({"query_starts": torch.zeros(3).long()}, "query_starts is torch.int64"),
    ({"query_starts": torch.zeros(6).int()[::2]}, "query_starts is .* stride 2"),
    ({"query_starts": torch.zeros(3, device="meta").int()}, "query_starts is on meta"),
    ({"max_query": -1}, r"max_query is -1, expected 0\.\.12"),
    ({"max_query": 13}, r"max_query is 13, expected 0\.\.12"),
    ({"scale": 0.0}, "scale is 0"),
    ({"window": 0}, "window is 0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    given = make([(5, 2), (7, 0)]).arguments()
    for name, value in change.items():
        on_device = isinstance(value, torch.Tensor) and not value.is_meta
        given[name] = value.to(DEVICE) if on_device else value
    with pytest.raises(ValueError, match=message):
        prefill_attention(**given)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "chunks",
    [
        [(1024, 0)] * 16,
        [(512, 3584), (1, 8191), (2048, 0), (77, 1000), (1, 0), (8, 4096)],
        [(2048, 6144)],
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (28, 4, 128)])
@pytest.mark.parametrize(("page_size", "window"), [(16, None), (16, 1000), (64, None)])
def test_real_shapes(
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
) -> None:
    given = make(
        chunks,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        window=window,
        dtype=torch.bfloat16,
    )
    found = check(given)
    assert torch.equal(bits(found), bits(prefill_attention(**given.arguments())))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
def test_real_head_dims(head_dim: int, dtype: torch.dtype, window: int | None) -> None:
    chunks = [(300, 0), (64, 500), (1, 700)]
    check(make(chunks, heads=8, head_dim=head_dim, page_size=16, window=window, dtype=dtype))
