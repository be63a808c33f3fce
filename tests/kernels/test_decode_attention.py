"""decode_attention: what plain torch gives, whatever the other rows and the unused pages hold."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine.kernels import attention_reference as reference
from engine.kernels.decode_attention import (
    DecodeTile,
    DecodeWorkspace,
    decode_attention,
    decode_workspace,
    decode_workspace_bytes,
    plan_splits,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = DecodeTile(tokens=16, warps=4, stages=2)
FLOATS = [torch.float32, torch.bfloat16]
LENGTHS = [1, 300, 0, 16, 129, 0]


@dataclass(frozen=True)
class Given:
    """Arguments of decode_attention. Unused pages and tokens are NaN, page numbers that no token
    needs are far outside of the cache, padded rows have NaN queries.
    """

    q: torch.Tensor
    cache: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    window: int | None
    workspace: DecodeWorkspace

    def arguments(self) -> dict[str, Any]:
        return dict(self.__dict__)


def make(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 4,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    num_sms: int = 24,
    max_pages: int | None = None,
) -> Given:
    torch.manual_seed(sum(lengths) + heads)
    used = [-(-length // page_size) for length in lengths]
    num_pages = sum(used) + 3
    numbers = torch.randperm(num_pages)
    shape = (2, num_pages, kv_heads, page_size, head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    max_pages = max_pages or max(used) + 1
    table = torch.full((len(lengths), max_pages), 1 << 30, dtype=torch.int32)
    begin = 0
    for row, (length, pages) in enumerate(zip(lengths, used, strict=True)):
        own = numbers[begin : begin + pages]
        table[row, :pages], begin = own, begin + pages
        data = torch.randn(2, kv_heads, pages * page_size, head_dim, dtype=dtype, device=DEVICE)
        data[:, :, length:] = float("nan")
        cache[:, own.to(DEVICE)] = data.unflatten(2, (-1, page_size)).transpose(1, 2)
    q = torch.randn(len(lengths), heads, head_dim)
    q[[length == 0 for length in lengths]] = float("nan")
    workspace = decode_workspace(
        max_rows=len(lengths),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_tokens=max_pages * page_size,
        num_sms=num_sms,
        device=DEVICE,
    )
    return Given(
        q.to(DEVICE, dtype),
        cache,
        table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        head_dim**-0.5,
        window,
        workspace,
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check(given: Given, tile: DecodeTile | None = None, error: float = 1e-5) -> torch.Tensor:
    """Same as the reference, zeros for padded rows, counters as they were.
    bfloat16 rounds the weights of the values before, and the result after their sum.
    """
    found = decode_attention(**given.arguments(), tile=tile)
    expected = reference.decode_attention(**given.arguments())
    assert found.shape == expected.shape and found.dtype is expected.dtype
    tolerance = error if found.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert (found[given.lengths == 0] == 0).all()
    assert not given.workspace.counters.any()
    return found


def num_splits(given: Given) -> int:
    pairs = given.q.shape[0] * given.cache.shape[2]
    max_tokens = given.page_table.shape[1] * given.cache.shape[3]
    return plan_splits(pairs, max_tokens, given.workspace.num_sms)[0]


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("page_size", [4, 16])
def test_rows_of_different_lengths(page_size: int, window: int | None) -> None:
    """Padded rows, rows of one split and of several, splits that a window leaves out."""
    given = make(LENGTHS, page_size=page_size, window=window)
    assert num_splits(given) == 3
    found = check(given, SMALL)
    assert torch.equal(bits(found), bits(decode_attention(**given.arguments(), tile=SMALL)))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("dtype", FLOATS)
def test_groups(group: int, dtype: torch.dtype) -> None:
    given = make([150, 3], heads=2 * group, page_size=16, dtype=dtype)
    assert num_splits(given) == 2
    check(given)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", FLOATS)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    given = make([290, 70], heads=2, kv_heads=1, head_dim=head_dim, page_size=16, dtype=dtype)
    assert num_splits(given) == 3
    check(given)


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize("window", [None, 100])
def test_pages(page_size: int, window: int | None) -> None:
    """Smaller than a tile, not a divisor of one, as large."""
    check(make([260, 65, 64], kv_heads=1, page_size=page_size, window=window))


@pytest.mark.parametrize("window", [None, 150])
def test_rows_do_not_touch_each_other(window: int | None) -> None:
    """A row's bits are the same if the others are full of NaN, shorter, padded."""
    given = make(LENGTHS, page_size=16, window=window)
    among = check(given, SMALL)
    for row in (1, 4):
        pages = given.page_table[row, : -(-LENGTHS[row] // 16)].long()
        sick, sick_q = torch.full_like(given.cache, float("nan")), given.q * float("nan")
        sick[:, pages], sick_q[row] = given.cache[:, pages], given.q[row]
        lengths = given.lengths.clamp(max=1)
        lengths[row], lengths[row - 1] = given.lengths[row], 0
        for changed in (
            replace(given, q=sick_q, cache=sick),
            replace(given, q=sick_q, cache=sick, lengths=lengths),
        ):
            found = decode_attention(**changed.arguments(), tile=SMALL)
            assert torch.equal(bits(found[row]), bits(among[row]))
            assert not changed.workspace.counters.any()


def test_keys_before_the_window_are_not_read() -> None:
    """Their pages may belong to others by now."""
    given = make([300], window=150)
    assert num_splits(given) > 1
    expected = decode_attention(**given.arguments(), tile=SMALL)
    given.page_table[0, : 150 // 4] = 1 << 30
    given.cache[:, given.page_table[0, 150 // 4], :, : 150 % 4] = float("nan")
    found = decode_attention(**given.arguments(), tile=SMALL)
    assert torch.equal(bits(found), bits(expected)) and found.isfinite().all()


def test_strides() -> None:
    """q as a slice of a fused projection, a table that is part of a wider one."""
    given = make([5, 0, 140])
    expected = decode_attention(**given.arguments())
    wide = given.q.new_full((3, 8, 64), float("nan"))
    wide[:, 2:6] = given.q
    table = torch.full((3, 60), 1 << 30, dtype=torch.int32, device=DEVICE)
    width = given.page_table.shape[1]
    table[:, :width] = given.page_table
    changed = replace(given, q=wide[:, 2:6], page_table=table[:, :width])
    assert torch.equal(bits(decode_attention(**changed.arguments())), bits(expected))


def test_no_rows() -> None:
    given = make([5])
    none = replace(given, q=given.q[:0], page_table=given.page_table[:0], lengths=given.lengths[:0])
    assert decode_attention(**none.arguments()).shape == (0, 256)


def test_large_scores() -> None:
    """Splits whose sums of exponentials are far apart. Scores of whole numbers are exact."""
    given = make([290])
    given.cache.round_()
    check(replace(given, q=(given.q * 300).round()), SMALL, error=1e-3)
    given.cache[0] *= torch.arange(given.cache.shape[1], device=DEVICE)[:, None, None, None]
    check(replace(given, q=(given.q * 100).round()), SMALL, error=1e-3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(2, 4, 72)}, "head_dim 72, expected one of"),
    ({"q": torch.zeros(2, 3, 64)}, "q is 3 heads"),
    ({"q": torch.zeros(2, 130, 64)}, r"q is 130 heads, expected 1\.\.64"),
    ({"q": torch.zeros(2, 64)}, r"q is .*\(2, 64\)"),
    ({"q": torch.zeros(2, 64, 64).mT}, "with D contiguous"),
    ({"q": torch.zeros(2, 4, 64, dtype=torch.float64)}, "q is torch.float64"),
    ({"q": torch.zeros(3, 4, 64)}, "page_table has 2 rows, expected 3"),
    ({"cache": torch.zeros(2, 9, 2, 4, 64, dtype=torch.float16)}, "cache is torch.float16"),
    ({"cache": torch.zeros(2, 9, 2, 4, 32)}, "contiguous with head_dim 64"),
    ({"cache": torch.zeros(2, 9, 4, 2, 64).transpose(2, 3)}, "contiguous with head_dim 64"),
    ({"cache": torch.zeros(2, 9, 0, 4, 64)}, "for each of 0 kv heads"),
    ({"cache": torch.zeros(2, 1, 2, 2048, 64)}, "page size is 2048"),
    ({"page_table": torch.zeros(2, 4).long()}, "page_table is torch.int64"),
    ({"page_table": torch.zeros(3, 4).int()}, r"page_table is \(3, 4\), expected \[2"),
    ({"page_table": torch.zeros(2, 0).int()}, r"page_table is \(2, 0\)"),
    ({"page_table": torch.zeros(2, 400).int()}, "workspace has"),
    ({"lengths": torch.zeros(4).int()[::2]}, "lengths is"),
    ({"lengths": torch.zeros(2, device="meta").int()}, "device of q"),
    ({"scale": 0.0}, "scale is 0"),
    ({"window": 0}, "window is 0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    given = make([5, 9]).arguments()
    for name, value in change.items():
        on_device = isinstance(value, torch.Tensor) and not value.is_meta
        given[name] = value.to(DEVICE) if on_device else value
    with pytest.raises(ValueError, match=message):
        decode_attention(**given)


def test_workspace_on_another_device() -> None:
    given = make([5])
    away = replace(given.workspace, partials=given.workspace.partials.to("meta"))
    with pytest.raises(ValueError, match="workspace is on meta"):
        decode_attention(**replace(given, workspace=away).arguments())


@pytest.mark.parametrize("max_tokens", [16, 1000, 8192, 131072])
@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
def test_workspace_holds_all_batches(kv_heads: int, max_tokens: int) -> None:
    sizes: dict[str, int] = dict(
        max_rows=70, heads=32, kv_heads=kv_heads, head_dim=64, max_tokens=max_tokens, num_sms=132
    )
    space = decode_workspace(**sizes, device=torch.device("meta"))
    total = space.partials.numel() + space.stats.numel() + space.counters.numel()
    assert decode_workspace_bytes(**sizes) == 4 * total
    for rows in range(1, 71):
        splits, least = plan_splits(rows * kv_heads, max_tokens, 132)
        assert 1 <= splits <= 64 and (splits - 1) * least < max_tokens
        assert space.stats.numel() >= rows * 32 * splits
        assert space.counters.numel() >= rows * kv_heads


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17, 32, 64])
@pytest.mark.parametrize("context", [100, 1024, 8192])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window", [None, 1000])
def test_real_shapes_in_a_graph(
    batch: int, context: int, dtype: torch.dtype, window: int | None
) -> None:
    """One captured graph, replayed with other lengths and the counters as left."""
    given = make(
        [context] * batch,
        heads=32,
        kv_heads=8,
        head_dim=128,
        page_size=16,
        window=window,
        dtype=dtype,
        num_sms=torch.cuda.get_device_properties(DEVICE).multi_processor_count,
        max_pages=8192 // 16,
    )
    whole = check(given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decode_attention(**given.arguments())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode_attention(**given.arguments())
    for seed in range(3):
        torch.manual_seed(seed)
        given.lengths.copy_(torch.randint(0, context + 1, (batch,)))
        given.lengths[seed % batch] = context
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(found), bits(check(given)))
        assert torch.equal(bits(found[seed % batch]), bits(whole[seed % batch]))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "page_size"), [(1, 16), (4, 4), (7, 64), (64, 16)])
def test_real_head_dims(head_dim: int, dtype: torch.dtype, group: int, page_size: int) -> None:
    lengths = [1500, 1, 0, 64, 777]
    check(
        make(
            lengths,
            heads=2 * group,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            num_sms=torch.cuda.get_device_properties(DEVICE).multi_processor_count,
        )
    )
