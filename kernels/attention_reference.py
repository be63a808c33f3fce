"""Attention over paged keys and values in plain torch and float32, the measure of the kernels.

Shapes: T tokens, B rows, H query heads, K kv heads, D head_dim, P pages of S tokens. Row by row and
without a thought for speed. Signatures are those of decode_attention.py and prefill_attention.py.
"""

import torch


def decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    workspace: object = None,
) -> torch.Tensor:
    """q [B, H, D], one new token a row -> [B, H * D] in q's dtype. `workspace` is not used."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, length in enumerate(lengths.tolist()):
        if length > 0:
            queries = q[row : row + 1]
            out[row] = _attend(queries, cache, page_table[row], length, scale, window)[0]
    return out.flatten(1)


def prefill_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    max_query: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """q [T, H, D], row b's chunk at query_starts[b]..query_starts[b + 1] -> [T, H * D] in q's
    dtype. `max_query` is not used.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        own = slice(starts[row], starts[row + 1])
        if own.start < own.stop:
            out[own] = _attend(q[own], cache, page_table[row], length, scale, window)
    return out.flatten(1)


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The last queries [C, H, D] of a context of `length` tokens -> [C, H, D]."""
    page_size = cache.shape[3]
    own = cache[:, pages[: -(-length // page_size)].long()]  # [2, pages, K, S, D]
    flat = own.transpose(2, 3).flatten(1, 2)[:, :length].float()  # [2, L, K, D]
    k, v = flat.repeat_interleave(q.shape[1] // cache.shape[2], 2).unbind()
    keys = torch.arange(length, device=q.device)
    queries = torch.arange(length - q.shape[0], length, device=q.device)[:, None]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    scores = torch.einsum("chd,lhd->hcl", q.float(), k) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hcl,lhd->chd", weights, v).to(q.dtype)
