"""Rotary position embedding on the leading dimensions of each head, rotate-half convention.

Shapes: T tokens, N heads, D head_dim, P rotary_dim <= D. Formula: (a, b) -> (a cos - b sin, b cos +
a sin) with a and b the two halves of the first P dimensions (Su et al., 2021).
"""

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, N, D] rotated by cos and sin [T, 1, P] in x's dtype, which give each angle twice, the
    first half of sin negated -> [T, N, D], contiguous.
    """
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    half = rotary_dim // 2
    swapped = torch.cat((rotated[..., half:], rotated[..., :half]), dim=-1)
    out = (rotated * cos).addcmul_(swapped, sin)
    return out if rotary_dim == x.shape[-1] else torch.cat((out, rest), dim=-1)
