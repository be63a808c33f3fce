"""SwiGLU feed-forward block: down(silu(gate(x)) * up(x))."""

from typing import Any

import torch

from engine.layers.build import BuildContext
from engine.layers.linear import Cut, Linear, Member
from engine.layers.weight_slot import WeightSlot


class MLP:
    """Gate and up share one matrix."""

    def __init__(
        self, ctx: BuildContext, name: str, hidden: int, ffn: int, *, bias: bool, fused_names: bool
    ) -> None:
        self.name = name
        self.ops = ctx.ops
        self.fused_names = fused_names
        gate_up = (Member(f"{name}.gate_proj", ffn), Member(f"{name}.up_proj", ffn))
        self.gate_up = Linear(ctx, hidden, gate_up, bias=bias, cut=Cut.column)
        self.down = Linear(ctx, ffn, (Member(f"{name}.down_proj", hidden),), bias=bias, cut=Cut.row)

    def __call__(self, x: torch.Tensor, lora: Any = None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(self.ops.silu_mul(self.gate_up(x, lora)), lora)

    def slots(self) -> dict[str, WeightSlot]:
        gate_up = (
            self.gate_up.fused_slots(f"{self.name}.gate_up_proj")
            if self.fused_names
            else self.gate_up.slots()
        )
        return gate_up | self.down.slots()
