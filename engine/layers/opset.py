"""The ops that layers call, as one value: an implementation is chosen once, by config, and handed
to all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.config import KernelsConfig, KernelSet
from engine.device import Device
from engine.kernels import lora, norm, rope, silu_mul
from engine.kernels.linear import has_blocked_layout, linear, pack_weight


@dataclass(frozen=True, slots=True)
class OpSet:
    """One callable per op; signatures are those of the plain-torch references beside this file.

    `lora_by_tables`: `bind_lora` takes a TableWork in the place of a LoRAWork. An adapter's pool
    rows come in multiples of `row_alignment`.
    """

    linear: Callable[..., torch.Tensor]
    pack_weight: Callable[[torch.Tensor], torch.Tensor]
    has_blocked_layout: Callable[[str, torch.dtype], bool]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., torch.Tensor]
    apply_rope: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    bind_lora: Callable[..., Any]
    add_lora: Callable[..., None]
    add_embedding_lora: Callable[..., None]
    saved_deltas: Callable[..., list[torch.Tensor]]
    lora_by_tables: bool
    row_alignment: int

    @classmethod
    def select(cls, cfg: KernelsConfig, device: Device) -> "OpSet":
        """The set that `kernels.ops` names. Raises ConfigError if it, or `kernels.attention`, which
        is chosen apart, cannot run there.
        """
        for key, chosen in (("ops", cfg.ops), ("attention", cfg.attention)):
            if chosen is KernelSet.triton:
                device.check_triton(f"kernels.{key}")
        if cfg.ops is KernelSet.reference:
            return REFERENCE
        from engine.kernels import fused_lora, fused_norm, fused_silu_mul
        from engine.kernels.lora_tables import BLOCK

        return replace(
            REFERENCE,
            rms_norm=fused_norm.rms_norm,
            add_rms_norm=fused_norm.add_rms_norm,
            silu_mul=fused_silu_mul.silu_mul,
            bind_lora=fused_lora.bind_lora,
            add_lora=fused_lora.add_lora,
            lora_by_tables=True,
            row_alignment=BLOCK,
        )


REFERENCE = OpSet(
    linear=linear,
    pack_weight=pack_weight,
    has_blocked_layout=has_blocked_layout,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    apply_rope=rope.apply_rope,
    silu_mul=silu_mul.silu_mul,
    bind_lora=lora.bind_lora,
    add_lora=lora.add_lora,
    add_embedding_lora=lora.add_embedding_lora,
    saved_deltas=lora.saved_deltas,
    lora_by_tables=False,
    row_alignment=8,
)
