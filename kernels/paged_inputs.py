"""What the attention kernels over paged keys and values share: checks of what they are given, and
where a tile's tokens lie in the cache.

Shapes: H query heads, K kv heads, D head_dim, P pages of S tokens; a cache is [2, P, K, S, D],
keys, then values.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import DTYPES, layout, refuse

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
MAX_GROUP = 64


def check_inputs(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """ValueError on the first thing that the attention kernels do not take."""

    if q.dim() != 3 or q.stride(2) != 1:
        refuse("q", layout(q), "[N, H, D] with D contiguous")
    if q.dtype not in DTYPES or q.shape[2] not in HEAD_DIMS:
        refuse("q", f"{q.dtype}, head_dim {q.shape[2]}", f"one of {DTYPES}, {HEAD_DIMS}")
    if cache.dim() != 5 or cache.shape[0] != 2 or cache.dtype is not q.dtype:
        refuse("cache", f"{cache.dtype} {tuple(cache.shape)}", f"{q.dtype} [2, P, K, S, D]")
    if cache.shape[4] != q.shape[2] or not cache[0].is_contiguous():
        refuse("cache", layout(cache), f"contiguous with head_dim {q.shape[2]}")
    heads, kv_heads, page_size = q.shape[1], cache.shape[2], cache.shape[3]
    if not 1 <= page_size <= 1024:
        refuse("page size", page_size, "1..1024")
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= MAX_GROUP:
        refuse("q", f"{heads} heads", f"1..{MAX_GROUP} for each of {kv_heads} kv heads")
    for name, table, dims in (("page_table", page_table, 2), ("lengths", lengths, 1)):
        if table.dtype is not torch.int32 or table.dim() != dims or table.stride(-1) != 1:
            refuse(name, layout(table), f"torch.int32 of {dims} dimensions, the last contiguous")
    if page_table.shape[0] != lengths.shape[0] or page_table.shape[1] == 0:
        refuse("page_table", tuple(page_table.shape), f"[{lengths.shape[0]}, at least 1]")
    devices = [tensor.device for tensor in (q, cache, page_table, lengths)]
    if len(set(devices)) > 1:
        refuse("device of q, cache, page_table, lengths", devices, "the same for all")
    if not scale > 0:
        refuse("scale", scale, "more than 0")
    if window is not None and window < 1:
        refuse("window", window, "1 or more, or None")


def padded_dim(head_dim: int) -> int:
    return int(triton.next_power_of_2(head_dim))


@triton.jit  # type: ignore[untyped-decorator]
def tile_offsets(  # type: ignore[no-untyped-def]
    table,
    begin,
    live,
    head,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where the head's tokens begin..begin + TILE lie in keys or values, int64 [TILE], in elements.
    Page numbers are read only for live tokens if MASKED.
    """
    lanes = tl.arange(0, TILE)
    if PAGE_SIZE % TILE == 0:  # begin is a multiple of TILE: one page holds the tile
        page = tl.load(table + begin // PAGE_SIZE).to(tl.int64)
        return (page * KV_HEADS + head) * (PAGE_SIZE * HEAD_DIM) + (
            begin % PAGE_SIZE + lanes
        ) * HEAD_DIM
    tokens = begin + lanes
    if MASKED:
        pages = tl.load(table + tokens // PAGE_SIZE, mask=live, other=0)
    else:
        pages = tl.load(table + tokens // PAGE_SIZE)
    places = (pages.to(tl.int64) * KV_HEADS + head) * (PAGE_SIZE * HEAD_DIM)
    return places + (tokens % PAGE_SIZE) * HEAD_DIM
