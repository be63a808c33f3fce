"""What lies between the q/k/v projection and attention, in one Triton launch: the optional norm of
q and k heads, rotary embedding, and the store of keys and values into the paged cache.

Shapes: T tokens, H query heads, K kv heads, D head_dim, P rotary_dim <= D, pages of S tokens. A
program makes a few heads of one token. Rounds where norm.py and rope.py do: after the norm, after
the product with cos, at the end. Knows nothing of positions or of who holds which page.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import DTYPES, layout, refuse
from engine.kernels.paged_inputs import HEAD_DIMS, padded_dim

_TILE_ELEMENTS, _WARPS = 1024, 4


def rope_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """qkv [T, (H + 2K) * D], rows contiguous -> q [T, H, D], contiguous; k and v go into the cache.

    cos and sin [T, P], rows contiguous, give each angle twice, the first half of sin negated. cache
    [2, pages, K, S, D]: keys, then values. slots int32 or int64 [T], page * S + offset within the
    page: below 0 is a padded token, its q is zeros and nothing is stored; no two others are the
    same, none lies beyond the cache. q_norm and k_norm [D]: both or neither. All floats are of one
    dtype. One launch whose grid depends on shapes alone; ValueError on what does not fit.
    """
    _check(qkv, cos, sin, cache, slots, num_heads, q_norm, k_norm)
    tokens, rotary_dim = cos.shape
    _, _, kv_heads, page_size, head_dim = cache.shape
    q = qkv.new_empty((tokens, num_heads, head_dim))
    if tokens == 0:
        return q
    dim_pad = padded_dim(head_dim)
    tile = max(1, _TILE_ELEMENTS // dim_pad)
    _rope_kernel[(tokens, triton.cdiv(num_heads + 2 * kv_heads, tile))](
        qkv,
        cos,
        sin,
        cache,
        slots,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        q,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        cache.stride(0),
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        PAGE_SIZE=page_size,
        DIM_PAD=dim_pad,
        TILE=tile,
        HAS_NORM=q_norm is not None,
        num_warps=_WARPS,
    )
    return q


def _check(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    """ValueError on the first thing that `rope_write_kv` does not take."""

    dtype = qkv.dtype
    if dtype not in DTYPES:
        refuse("qkv", dtype, f"one of {DTYPES}")
    if cache.dim() != 5 or cache.shape[0] != 2 or cache.dtype is not dtype:
        refuse("cache", layout(cache), f"{dtype} [2, pages, K, S, D]")
    _, _, kv_heads, _, head_dim = cache.shape
    if head_dim not in HEAD_DIMS or 0 in cache.shape or not cache[0].is_contiguous():
        refuse("cache", layout(cache), f"contiguous, not empty, D one of {HEAD_DIMS}")
    width = (num_heads + 2 * kv_heads) * head_dim
    if num_heads < 1 or qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
        heads = f"{num_heads} query and {kv_heads} kv heads of {head_dim}"
        refuse("qkv", layout(qkv), f"[T, {width}], rows contiguous, for {heads}")
    tokens = qkv.shape[0]
    for name, angles in (("cos", cos), ("sin", sin)):
        fits = angles.dim() == 2 and angles.shape == (tokens, cos.shape[-1])
        if not fits or angles.dtype is not dtype or angles.stride(1) != 1:
            refuse(name, layout(angles), f"{dtype} [{tokens}, P], rows contiguous, P of both alike")
    if not 2 <= cos.shape[1] <= head_dim or cos.shape[1] % 2:
        refuse("rotary dim", cos.shape[1], f"even and 2..{head_dim}")
    if slots.shape != (tokens,) or slots.dtype not in (torch.int32, torch.int64):
        refuse("slots", layout(slots), f"int32 or int64 [{tokens}]")
    if not slots.is_contiguous():
        refuse("slots", layout(slots), "contiguous")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm or k_norm is None, expected both or neither")
    norms = {name: n for name, n in (("q_norm", q_norm), ("k_norm", k_norm)) if n is not None}
    for name, norm in norms.items():
        if norm.shape != (head_dim,) or norm.dtype is not dtype or not norm.is_contiguous():
            refuse(name, layout(norm), f"{dtype} [{head_dim}] contiguous")
    named = {"cos": cos, "sin": sin, "cache": cache, "slots": slots, **norms}
    for name, tensor in named.items():
        if tensor.device != qkv.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {qkv.device} as qkv")


@triton.jit  # type: ignore[untyped-decorator]
def _rope_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    qkv_stride,
    cos_stride,
    sin_stride,
    values_at,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    dtype = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIM_PAD)
    swapped_dims = tl.where(dims < HALF, dims + HALF, dims - HALF)
    in_head, in_rotary = dims < HEAD_DIM, dims < ROTARY_DIM
    is_q, is_qk = heads < HEADS, heads < HEADS + KV_HEADS
    slot = tl.load(slots_ptr + token).to(tl.int64)

    head_at = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_DIM
    in_qkv = (heads < HEADS + 2 * KV_HEADS)[:, None] & in_head[None, :]
    in_swapped = is_qk[:, None] & in_rotary[None, :]
    x = tl.load(head_at + dims[None, :], mask=in_qkv, other=0.0)
    swapped = tl.load(head_at + swapped_dims[None, :], mask=in_swapped, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + dims, mask=in_rotary, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_stride + dims, mask=in_rotary, other=0.0).to(tl.float32)

    before = x.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(before * before, 1) / HEAD_DIM + eps)[:, None]
        weight = _weight(q_norm_ptr, k_norm_ptr, dims, in_head, is_q)
        before = (before * scale * weight).to(dtype).to(tl.float32)
        weight = _weight(q_norm_ptr, k_norm_ptr, swapped_dims, in_rotary, is_q)
        swapped = (swapped * scale * weight).to(dtype).to(tl.float32)
    turned = (before * cos[None, :]).to(dtype).to(tl.float32) + swapped * sin[None, :]
    turned = tl.where(in_rotary[None, :], turned, before).to(dtype)

    q_at = q_ptr + (token * HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    q = tl.where(slot >= 0, turned, tl.zeros_like(turned))
    tl.store(q_at, q, mask=is_q[:, None] & in_head[None, :])

    kv_head = tl.where(is_qk, heads - HEADS, heads - HEADS - KV_HEADS)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    rows = (page * KV_HEADS + kv_head) * PAGE_SIZE + offset
    kv_at = cache_ptr + tl.where(is_qk, 0, values_at) + rows * HEAD_DIM
    in_kv = in_qkv & (heads >= HEADS)[:, None] & (slot >= 0)
    tl.store(kv_at[:, None] + dims[None, :], tl.where(is_qk[:, None], turned, x), mask=in_kv)


@triton.jit
def _weight(q_norm_ptr, k_norm_ptr, dims, live, is_q):  # type: ignore[no-untyped-def]
    """Norm weights of each head's dims, float32; what v heads get is not used."""
    q_weight = tl.load(q_norm_ptr + dims, mask=live, other=0.0)
    k_weight = tl.load(k_norm_ptr + dims, mask=live, other=0.0)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :]).to(tl.float32)
