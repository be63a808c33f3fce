"""RMSNorm, alone and behind a residual add.

Shapes: T tokens, H hidden. Formula: x / sqrt(mean(x^2) + eps) * weight, statistics in float32
(Zhang and Sennrich, 2019).
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] -> [..., H] in x's dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x [T, H] to residual [T, H] in place, then return the norm of the sum [T, H]."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
