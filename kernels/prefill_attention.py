"""Attention of chunks of new tokens over paged keys and values, in Triton.

Shapes: T tokens, B rows, H query heads, K kv heads, G = H / K, D head_dim, P pages of S tokens. A
program takes some queries of one row, each with the G heads that share one kv head, and reads the
keys that they see, the chunk's own among them, from the cache. Tiles of keys that all its queries
see need no mask. What a row gets depends on its own tokens alone. Knows nothing of who holds which
page.
"""

import math
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import is_interpreted
from engine.kernels.paged_inputs import check_inputs, padded_dim, tile_offsets


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """(Token, head) pairs of a program, keys of one loop step, warps, depth of the load
    pipeline.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# By padded head_dim and bytes of an element. Two stages: a third would prefetch page numbers, not
# keys, and ptxas then serializes the wgmmas of pages smaller than a tile.
_TILES = {
    (256, 2): PrefillTile(128, 32, 8, 2),
    (64, 4): PrefillTile(64, 32, 4, 2),
    (128, 4): PrefillTile(64, 32, 4, 2),
    (256, 4): PrefillTile(64, 16, 4, 2),
}
_DEFAULT_TILE = PrefillTile(128, 64, 8, 2)


def prefill_tile(head_dim: int, dtype: torch.dtype) -> PrefillTile:
    """The tile that `prefill_attention` takes if it is not told one."""
    return _TILES.get((padded_dim(head_dim), dtype.itemsize), _DEFAULT_TILE)


def prefill_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    max_query: int,
    scale: float,
    window: int | None,
    *,
    tile: PrefillTile | None = None,
) -> torch.Tensor:
    """q [T, H, D], cache [2, P, K, S, D] (keys, then values), one floating dtype -> [T, H * D].

    query_starts int32 [B + 1]: row b's chunk is tokens query_starts[b]..query_starts[b + 1], at
    most `max_query` of them; an empty one is a padded row. lengths int32 [B]: keys of a row, the
    chunk's included as the last. page_table int32 [B, max_pages]: pages of a row in token order;
    what lies beyond its length is not read. window: a query sees only so many keys, its own as the
    last; older ones are not read. Tokens of no row are not written. One launch whose grid depends
    on shapes and `max_query`; ValueError on shapes, dtypes and devices that do not fit.
    """
    check_inputs(q, cache, page_table, lengths, scale, window)
    num_tokens, heads, head_dim = q.shape
    _, _, kv_heads, page_size, _ = cache.shape
    _check_chunks(query_starts, lengths, max_query, num_tokens)
    out = q.new_empty((num_tokens, heads * head_dim))
    tile = tile or prefill_tile(head_dim, q.dtype)
    group = heads // kv_heads
    num_blocks = triton.cdiv(max_query * group, tile.queries)
    programs = num_blocks * lengths.shape[0] * kv_heads
    if programs == 0:
        return out
    _prefill_kernel[(programs,)](
        q,
        cache,
        page_table,
        query_starts,
        lengths,
        out,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        cache.stride(0),
        scale * math.log2(math.e),
        window or 0,
        num_blocks,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PAD=padded_dim(head_dim),
        PAGE_SIZE=page_size,
        QUERIES=tile.queries,
        TILE=tile.keys,
        HAS_WINDOW=window is not None,
        WIDEN=is_interpreted(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _check_chunks(
    query_starts: torch.Tensor, lengths: torch.Tensor, max_query: int, num_tokens: int
) -> None:
    expected = (lengths.shape[0] + 1,)
    if query_starts.dtype is not torch.int32 or query_starts.shape != expected:
        found = f"{query_starts.dtype} {tuple(query_starts.shape)}"
        raise ValueError(f"query_starts is {found}, expected torch.int32 {expected}")
    if query_starts.stride(0) != 1 or query_starts.device != lengths.device:
        found = f"on {query_starts.device} with stride {query_starts.stride(0)}"
        raise ValueError(f"query_starts is {found}, expected on {lengths.device}, contiguous")
    if not 0 <= max_query <= num_tokens:
        raise ValueError(f"max_query is {max_query}, expected 0..{num_tokens}, the tokens of q")


@triton.jit(do_not_specialize=["window", "num_blocks", "table_stride"])  # type: ignore[untyped-decorator]
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    cache_ptr,
    page_table_ptr,
    query_starts_ptr,
    lengths_ptr,
    out_ptr,
    q_row_stride,
    q_head_stride,
    table_stride,
    values_at,
    scale_log2,
    window,
    num_blocks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    pair = tl.program_id(0) // num_blocks
    block = num_blocks - 1 - tl.program_id(0) % num_blocks  # most keys first
    row, head = pair // KV_HEADS, pair % KV_HEADS
    first = tl.load(query_starts_ptr + row)
    chunk = tl.load(query_starts_ptr + row + 1) - first
    if block * QUERIES >= chunk * GROUP:
        return
    cached = tl.load(lengths_ptr + row) - chunk

    lanes = block * QUERIES + tl.arange(0, QUERIES)
    queries, members = lanes // GROUP, lanes % GROUP
    dims = tl.arange(0, DIM_PAD)
    in_q = (queries < chunk)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first + queries).to(tl.int64)
    heads = head * GROUP + members
    q_at = q_ptr + (tokens * q_row_stride + heads * q_head_stride)[:, None] + dims[None, :]
    q = tl.load(q_at, mask=in_q, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)

    # Of positions, the block's queries are at oldest..newest and see keys low..newest.
    positions = cached + queries
    oldest = cached + block * QUERIES // GROUP
    newest = cached + tl.minimum((block * QUERIES + QUERIES - 1) // GROUP, chunk - 1)
    low, full_start = 0, 0
    if HAS_WINDOW:
        low = tl.maximum(oldest - window + 1, 0)
        full_start = tl.cdiv(tl.maximum(newest - window + 1, 0), TILE) * TILE
    full_stop = (oldest + 1) // TILE * TILE
    full_start = tl.minimum(full_start, full_stop)

    table = page_table_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    sums = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], -3.0e38, tl.float32)  # not -inf: a query may see no key of a tile
    for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
        if part == 0:
            start, stop = low // TILE * TILE, full_start
        elif part == 1:
            start, stop = full_start, full_stop
        else:
            start, stop = full_stop, newest + 1
        acc, sums, peak = _attend(
            acc,
            sums,
            peak,
            q,
            cache_ptr,
            cache_ptr + values_at,
            table,
            head,
            positions,
            start,
            stop,
            low,
            newest,
            scale_log2,
            window,
            part != 1,
            KV_HEADS,
            HEAD_DIM,
            DIM_PAD,
            PAGE_SIZE,
            TILE,
            HAS_WINDOW,
            WIDEN,
        )
    out_at = out_ptr + (tokens * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_at, (acc / sums[:, None]).to(out_ptr.dtype.element_ty), mask=in_q)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    acc,
    sums,
    peak,
    q,
    keys_ptr,
    values_ptr,
    table,
    head,
    positions,
    start,
    stop,
    low,
    newest,
    scale_log2,
    window,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Take in the tiles of keys from start on; unless MASKED, all queries see all of their keys."""
    dims = tl.arange(0, DIM_PAD)
    for begin in range(start, stop, TILE):
        keys = begin + tl.arange(0, TILE)
        live = (keys >= low) & (keys <= newest)
        places = tile_offsets(table, begin, live, head, MASKED, KV_HEADS, HEAD_DIM, PAGE_SIZE, TILE)
        at = places[:, None] + dims[None, :]
        if MASKED:
            in_tile = live[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys_ptr + at, mask=in_tile, other=0.0)
            v = tl.load(values_ptr + at, mask=in_tile, other=0.0)
        elif HEAD_DIM == DIM_PAD:
            k = tl.load(keys_ptr + at)
            v = tl.load(values_ptr + at)
        else:
            in_dims = (dims < HEAD_DIM)[None, :]
            k = tl.load(keys_ptr + at, mask=in_dims, other=0.0)
            v = tl.load(values_ptr + at, mask=in_dims, other=0.0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible &= keys[None, :] > positions[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        sums = sums * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="tf32x3")
        peak = new_peak
    return acc, sums, peak
