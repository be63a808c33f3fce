"""SwiGLU's elementwise part: silu(gate) * up. Shapes: T tokens, F ffn width."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2F] (gate first) -> [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
