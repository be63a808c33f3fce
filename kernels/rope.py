"""Rotary position embedding on the leading dimensions of each head, rotate-half convention.

Shapes: T tokens, N heads, D head_dim, P rotary_dim <= D. Formula: (a, b) -> (a cos - b sin, b cos +
a sin) with a and b the two halves of the first P dimensions (Su et al., 2021).
"""

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [T, N, D] in place by cos and sin [T, 1, P / 2], float32 or x's dtype."""
    half = cos.shape[-1]
    a = x[..., :half]
    b = x[..., half : 2 * half]
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    a.copy_(rotated_a)
    b.copy_(rotated_b)
