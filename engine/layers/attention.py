"""Self-attention layer: fused q/k/v projection, optional qk-norm, rope, a backend's attention,
output projection.

Where keys and values are kept and how a step is described to the kernels is the backend's business.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from engine.layers.build import BuildContext
from engine.layers.linear import Cut, Linear, Member
from engine.layers.norm import RMSNorm
from engine.layers.step import Step
from engine.layers.weight_slot import WeightSlot
from engine.models.spec import ModelSpec


class AttentionBackend(ABC):
    """Keeps keys and values and attends over them."""

    @abstractmethod
    def attend(
        self, layer: "Attention", qkv: torch.Tensor, rotation: "Rotation", step: Step
    ) -> torch.Tensor:
        """qkv [T, (H + 2K) * D] as projected -> causal attention [T, H * D].

        Norms of `layer`'s q and k and their rotation come before; keys and values are stored.
        """


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin [T, 1, rotary_dim] of the step's positions."""

    cos: torch.Tensor
    sin: torch.Tensor


class Attention:
    """One decoder layer's attention; shapes as in the backend, H and K local to the shard."""

    def __init__(self, ctx: BuildContext, name: str, layer: int, spec: ModelSpec) -> None:
        self.name = name
        self.layer = layer
        self.ops = ctx.ops
        self.fused_names = spec.fused_projections
        self.head_dim = spec.head_dim
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        members = (
            Member(f"{name}.q_proj", q_width),
            Member(f"{name}.k_proj", kv_width),
            Member(f"{name}.v_proj", kv_width),
        )
        self.qkv = Linear(ctx, spec.hidden_size, members, bias=spec.qkv_bias, cut=Cut.column)
        output = (Member(f"{name}.o_proj", spec.hidden_size),)
        self.output = Linear(ctx, q_width, output, bias=spec.o_bias, cut=Cut.row)
        self.num_heads, self.num_kv_heads = (
            width // spec.head_dim for width in self.qkv.widths[:2]
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(ctx, spec.head_dim, spec.rms_norm_eps)
            self.k_norm = RMSNorm(ctx, spec.head_dim, spec.rms_norm_eps)

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, backend: AttentionBackend, step: Step
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        qkv = self.qkv(x, step.lora)
        return self.output(backend.attend(self, qkv, rotation, step), step.lora)

    def rotated(
        self, qkv: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv as projected -> q [T, H, D] and k [T, K, D], normed and rotated, and v [T, K, D]."""
        qkv = qkv.view(qkv.shape[0], -1, self.head_dim)
        rotated = self.num_heads + self.num_kv_heads
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat(
                (self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), 1
            )
        qk = self.ops.apply_rope(qk, rotation.cos, rotation.sin)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], v

    def slots(self) -> dict[str, WeightSlot]:
        slots = (
            self.qkv.fused_slots(f"{self.name}.qkv_proj") if self.fused_names else self.qkv.slots()
        )
        slots |= self.output.slots()
        if self.q_norm is not None and self.k_norm is not None:
            slots |= self.q_norm.slots(f"{self.name}.q_norm") | self.k_norm.slots(
                f"{self.name}.k_norm"
            )
        return slots
