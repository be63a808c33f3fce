"""RMSNorm layer: a weight and the ops that use it."""

import torch

from engine.layers.build import BuildContext
from engine.layers.weight_slot import WeightSlot


class RMSNorm:
    """`weight` [size]."""

    def __init__(self, ctx: BuildContext, size: int, eps: float) -> None:
        self.ops = ctx.ops
        self.eps = eps
        self.weight = ctx.empty(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to residual in place, return the norm of the sum; all [T, size]."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": WeightSlot.whole(self.weight)}
