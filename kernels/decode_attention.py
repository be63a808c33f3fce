"""Attention of one new token a row over paged keys and values, in Triton.

Shapes: B rows, H query heads, K kv heads, G = H / K, D head_dim, P pages of S tokens. A program
reads one split of one row's context for one kv head, once for all its G query heads; the last
program of a row and head to finish adds the splits up, in their order. How a row is split depends
on the launch's shapes and on the row's own length, so neither other rows nor the order in which
programs finish change a bit of its result. Knows nothing of who holds which page.
"""

import math
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import is_interpreted
from engine.kernels.paged_inputs import check_inputs, padded_dim, tile_offsets

# Splits are made until each multiprocessor has this many programs, which is what fits.
_PROGRAMS_PER_SM = 2
_MAX_SPLITS = 64
# Where rows alone fill the card, only a long row is split, so that it does not finish last.
_SPLITS_OF_LONG_ROWS = 4
# float32 elements that the adding up of splits holds at once.
_COMBINE_ELEMENTS = 8192


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Tokens of one loop step, warps of a program, depth of the load pipeline."""

    tokens: int
    warps: int
    stages: int


# By padded head_dim and bytes of an element.
_TILES = {
    (256, 2): DecodeTile(32, 4, 3),
    (128, 4): DecodeTile(32, 4, 3),
    (256, 4): DecodeTile(16, 4, 3),
}
_DEFAULT_TILE = DecodeTile(64, 4, 3)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What launches share, one after the other: partial results and counts of finished splits.

    partials float32 [n * D] and stats float32 [n], n = most (row, split, query head)s of a launch;
    counters int32 [most rows * K], zero between launches. Two launches at once need two workspaces.
    """

    partials: torch.Tensor
    stats: torch.Tensor
    counters: torch.Tensor
    num_sms: int


def decode_tile(head_dim: int, dtype: torch.dtype) -> DecodeTile:
    """The tile that `decode_attention` takes if it is not told one."""
    return _TILES.get((padded_dim(head_dim), dtype.itemsize), _DEFAULT_TILE)


def plan_splits(pairs: int, max_tokens: int, num_sms: int) -> tuple[int, int]:
    """Most splits of a row and fewest tokens of a split, for `pairs` = B * K and rows of up to
    `max_tokens`.
    """
    fill = num_sms * _PROGRAMS_PER_SM // pairs
    if fill >= _SPLITS_OF_LONG_ROWS:
        splits, least = min(fill, _MAX_SPLITS), 128
    else:
        splits, least = _SPLITS_OF_LONG_ROWS, 512 if fill > 1 else 1024
    return max(1, min(splits, -(-max_tokens // least))), least


def decode_workspace_bytes(
    *, max_rows: int, heads: int, kv_heads: int, head_dim: int, max_tokens: int, num_sms: int
) -> int:
    """Bytes of `decode_workspace` with the same arguments."""
    states = _most_states(max_rows, heads, kv_heads, max_tokens, num_sms)
    return 4 * (states * (head_dim + 1) + max_rows * kv_heads)


def decode_workspace(
    *,
    max_rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_tokens: int,
    num_sms: int,
    device: torch.device,
) -> DecodeWorkspace:
    """For launches of 1..max_rows rows whose page tables hold up to max_tokens tokens."""
    states = _most_states(max_rows, heads, kv_heads, max_tokens, num_sms)
    return DecodeWorkspace(
        torch.empty(states * head_dim, dtype=torch.float32, device=device),
        torch.empty(states, dtype=torch.float32, device=device),
        torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device),
        num_sms,
    )


def decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    workspace: DecodeWorkspace,
    *,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """q [B, H, D], cache [2, P, K, S, D] (keys, then values), one floating dtype -> [B, H * D].

    page_table int32 [B, max_pages]: pages of a row in token order; what lies beyond its length is
    not read. lengths int32 [B]: keys of a row, the new token's included; 0 is a padded row, its
    output is zeros. window: only the last so many keys are read. One launch whose grid depends on
    shapes alone; ValueError on shapes, dtypes and devices that do not fit.
    """
    check_inputs(q, cache, page_table, lengths, scale, window)
    batch, heads, head_dim = q.shape
    _, _, kv_heads, page_size, _ = cache.shape
    if batch != page_table.shape[0]:
        raise ValueError(f"page_table has {page_table.shape[0]} rows, expected {batch} as q")
    out = q.new_empty((batch, heads * head_dim))
    if batch == 0:
        return out
    tile = tile or decode_tile(head_dim, q.dtype)
    max_tokens = page_table.shape[1] * page_size
    pairs = batch * kv_heads
    splits, least = plan_splits(pairs, max_tokens, workspace.num_sms)
    _check_workspace(workspace, pairs, splits * batch * heads, head_dim, q.device)
    group = heads // kv_heads
    dim_pad, group_pow = padded_dim(head_dim), triton.next_power_of_2(group)
    _decode_kernel[(pairs, splits)](
        q,
        cache,
        page_table,
        lengths,
        out,
        workspace.partials,
        workspace.stats,
        workspace.counters,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        cache.stride(0),
        scale * math.log2(math.e),
        window or 0,
        splits,
        max(1, least // tile.tokens),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_POW=group_pow,
        GROUP_PAD=max(16, group_pow),
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        PAGE_SIZE=page_size,
        TILE=tile.tokens,
        HAS_WINDOW=window is not None,
        COMBINE=max(1, min(16, _COMBINE_ELEMENTS // (group_pow * dim_pad))),
        WIDEN=is_interpreted(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _most_states(max_rows: int, heads: int, kv_heads: int, max_tokens: int, num_sms: int) -> int:
    rows = range(1, max_rows + 1)
    return max(n * heads * plan_splits(n * kv_heads, max_tokens, num_sms)[0] for n in rows)


def _check_workspace(
    workspace: DecodeWorkspace, pairs: int, states: int, head_dim: int, device: torch.device
) -> None:
    needs = (states * head_dim, states, pairs)
    has = (workspace.partials.numel(), workspace.stats.numel(), workspace.counters.numel())
    if any(size < need for size, need in zip(has, needs, strict=True)):
        raise ValueError(f"workspace has {has} partials, stats, counters, expected {needs} or more")
    if workspace.partials.device != device:
        raise ValueError(f"workspace is on {workspace.partials.device}, expected {device}")


@triton.jit(do_not_specialize=["window", "num_splits", "least_tiles", "table_stride"])  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    cache_ptr,
    page_table_ptr,
    lengths_ptr,
    out_ptr,
    partials_ptr,
    stats_ptr,
    counters_ptr,
    q_row_stride,
    q_head_stride,
    table_stride,
    values_at,
    scale_log2,
    window,
    num_splits,
    least_tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    COMBINE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    pair, split = tl.program_id(0), tl.program_id(1)
    row, head = pair // KV_HEADS, pair % KV_HEADS
    length = tl.load(lengths_ptr + row)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(length - window, 0)
    first_tile = low // TILE
    num_tiles = tl.cdiv(length, TILE) - first_tile
    split_tiles = tl.maximum(least_tiles, tl.cdiv(num_tiles, num_splits))
    own_splits = tl.maximum(tl.cdiv(num_tiles, split_tiles), 1)
    if split >= own_splits:
        return
    start = (first_tile + split * split_tiles) * TILE
    stop = tl.minimum(start + split_tiles * TILE, length)

    dims = tl.arange(0, DIM_PAD)
    group = tl.arange(0, GROUP_PAD)
    in_q = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = q_ptr + row.to(tl.int64) * q_row_stride + head * GROUP * q_head_stride
    q = tl.load(q_at + group[:, None] * q_head_stride + dims[None, :], mask=in_q, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    table = page_table_ptr + row.to(tl.int64) * table_stride
    lanes = tl.arange(0, TILE)

    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    sums = tl.zeros([GROUP_PAD, TILE], tl.float32)  # added up across tokens once, at the end
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for begin in range(start, stop, TILE):
        live = (begin + lanes < stop) & (begin + lanes >= low)
        places = tile_offsets(table, begin, live, head, True, KV_HEADS, HEAD_DIM, PAGE_SIZE, TILE)
        at = places[:, None] + dims[None, :]
        in_tile = live[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(cache_ptr + at, mask=in_tile, other=0.0)
        v = tl.load(cache_ptr + values_at + at, mask=in_tile, other=0.0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)[:, None]
        sums = sums * decay + weights
        acc = tl.dot(weights.to(v.dtype), v, acc * decay, input_precision="tf32x3")
        peak = new_peak
    total = tl.sum(sums, 1)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]

    if own_splits == 1:
        out_at = out_ptr + (pair.to(tl.int64) * GROUP + group[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_q)
        return
    state = (pair.to(tl.int64) * num_splits + split) * GROUP + group
    tl.store(partials_ptr + state[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_q)
    tl.store(stats_ptr + state, peak + tl.log2(total), mask=group < GROUP)
    # All threads' stores come before the count, the count of the last before its loads.
    tl.debug_barrier()
    finished = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu")
    if finished == own_splits - 1:
        tl.store(counters_ptr + pair, 0)
        _combine(
            partials_ptr,
            stats_ptr,
            out_ptr,
            pair.to(tl.int64),
            num_splits,
            own_splits,
            GROUP,
            GROUP_POW,
            HEAD_DIM,
            DIM_PAD,
            COMBINE,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    partials_ptr,
    stats_ptr,
    out_ptr,
    pair,
    num_splits,
    own_splits,
    GROUP: tl.constexpr,
    GROUP_POW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    COMBINE: tl.constexpr,
):
    """Weigh each split's result by the sum of its exponentials. Reads past the L1 cache."""
    group, dims = tl.arange(0, GROUP_POW), tl.arange(0, DIM_PAD)
    in_out = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    peak = tl.full([GROUP_POW], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_POW], tl.float32)
    acc = tl.zeros([GROUP_POW, DIM_PAD], tl.float32)
    for begin in range(0, own_splits, COMBINE):
        splits = begin + tl.arange(0, COMBINE)
        live = (splits < own_splits)[:, None]
        states = (pair * num_splits + splits)[:, None] * GROUP + group[None, :]
        in_stats = live & (group < GROUP)[None, :]
        stats = tl.load(stats_ptr + states, mask=in_stats, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partials_ptr + states[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=in_stats[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        stats = tl.where(live, stats, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(stats, 0))
        weights = tl.exp2(stats - new_peak[None, :])
        decay = tl.exp2(peak - new_peak)
        acc = acc * decay[:, None] + tl.sum(parts * weights[:, :, None], 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    acc = acc / total[:, None]
    out_at = out_ptr + (pair * GROUP + group[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_out)
