"""Attention over paged keys and values, in plain torch.

Shapes: T tokens, B rows, H query heads, K kv heads, G = H / K, D head_dim, P pages of S tokens. A
layer's cache is [2, P, K, S, D], keys then values: one head's tokens of a page lie together, so a
gather of pages gives contiguous [K, L, D] operands. Knows nothing of who holds which page.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Up to this many rows, the fused kernel beats batched products (MKL 2024.2, 2 threads).
_FUSED_ROWS = 8


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with one new token each and similar context lengths.

    `rows` [B] indexes the step's tokens (None: all of them, in order); `head_pages`
    [2 * B * K * pages] indexes the cache seen as [2 * P * K, S * D]; `bias` [B * K, 1, L] is 0
    where a key may be read and -inf elsewhere, in the cache's dtype.
    """

    rows: torch.Tensor | None
    head_pages: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One request's chunk: tokens `start`..`stop` of the step.

    `head_pages` [2 * K * pages] covers cached context and chunk, None when the chunk is the whole
    context; `bias` [chunk, context] as above, None for plain causal attention.
    """

    start: int
    stop: int
    context: int
    head_pages: torch.Tensor | None
    bias: torch.Tensor | None


def write_kv(cache: torch.Tensor, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k and v [T, K, D] at positions index [T * 2 * K] of the cache seen as [..., D]."""
    head_dim = cache.shape[-1]
    cache.view(-1, head_dim).index_copy_(0, index, torch.cat((k, v), 1).view(-1, head_dim))


def write_index(slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Where `write_kv` stores the tokens of `slots` int64 [T], page * S + offset within the page:
    int64 [T * 2 * K] on the slots' device. Only the shape of `cache` is looked at.
    """
    _, pages, kv_heads, page_size, _ = cache.shape
    sides = torch.arange(2, device=slots.device)[:, None] * pages
    heads = torch.arange(kv_heads, device=slots.device)
    rows = (slots[:, None, None] // page_size + sides) * kv_heads + heads
    return (rows * page_size + slots[:, None, None] % page_size).flatten()


def _gather(
    cache: torch.Tensor, head_pages: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one or more rows' pages, each [B * K, L, D]."""
    _, _, _, page_size, head_dim = cache.shape
    flat = cache.view(-1, page_size * head_dim).index_select(0, head_pages)
    k, v = flat.view(2, num_heads, -1, head_dim).unbind()
    return k, v


def decode_attention(
    q: torch.Tensor, cache: torch.Tensor, group: DecodeRows, scale: float
) -> torch.Tensor:
    """q [B, H, D], already the group's rows -> [B, H * D].

    GQA: a head's keys are read once for its G queries.
    """
    batch, heads, head_dim = q.shape
    kv_heads = cache.shape[2]
    q = q.reshape(batch * kv_heads, heads // kv_heads, head_dim)
    k, v = _gather(cache, group.head_pages, batch * kv_heads)
    if batch <= _FUSED_ROWS:
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=group.bias[None], scale=scale
        )
    else:
        scores = torch.baddbmm(group.bias, q, k.transpose(1, 2), alpha=scale)
        out = torch.bmm(scores.softmax(-1), v)
    return out.reshape(batch, heads * head_dim)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    row: PrefillRow,
    scale: float,
) -> torch.Tensor:
    """q [chunk, H, D], k and v [chunk, K, D] (already in the cache too) -> [chunk, H * D]."""
    k_heads, v_heads = k.transpose(0, 1), v.transpose(0, 1)
    if row.head_pages is not None:
        k_heads, v_heads = _gather(cache, row.head_pages, cache.shape[2])
        k_heads, v_heads = k_heads[:, : row.context], v_heads[:, : row.context]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k_heads[None],
        v_heads[None],
        attn_mask=row.bias,
        is_causal=row.bias is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).flatten(1)
