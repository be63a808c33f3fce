"""Rotary frequencies of a model and the cos/sin of a step's positions, computed where they are
needed.

Formulas: theta^(-2i/d) (Su et al., 2021); linear scaling divides all frequencies; Llama 3.1 scales
low ones and blends the middle (Meta, 2024). Knows nothing of heads.
"""

import math

import torch

from engine.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec) -> torch.Tensor:
    """float32 [rotary_dim / 2] on the CPU."""
    exponents: torch.Tensor = (
        torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    )
    frequencies: torch.Tensor = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    assert rope.low_freq_factor and rope.high_freq_factor and rope.original_max_position
    turns: torch.Tensor = rope.original_max_position * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    blend = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


class Rotary:
    """Holds the frequencies; one per model."""

    def __init__(self, rope: RopeSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.frequencies = inverse_frequencies(rope).to(device)
        self.dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> cos, sin [T, 1, rotary_dim] in the model's dtype.

        Each half holds all angles; the first half of sin is negated, for the rotate-half
        convention.
        """
        angles = (positions[:, None].float() * self.frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)
