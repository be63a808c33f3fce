"""`rope_write_kv` of fused_rope.py in plain torch, the measure of the kernel.

Shapes: T tokens, H query heads, K kv heads, D head_dim, P rotary_dim, pages of S tokens.
"""

import torch

from engine.kernels.norm import rms_norm
from engine.kernels.paged_attention import write_index, write_kv
from engine.kernels.rope import apply_rope


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
    """qkv [T, (H + 2K) * D], cos and sin [T, P], cache [2, pages, K, S, D] contiguous, slots [T]
    -> q [T, H, D]; zeros for tokens with a slot below 0, whose k and v are not stored.
    """
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    q, k = (apply_rope(x, cos[:, None], sin[:, None]) for x in (q, k))
    live = slots >= 0
    write_kv(cache, write_index(slots[live].long(), cache), k[live], v[live])
    return q.masked_fill(~live[:, None, None], 0)
