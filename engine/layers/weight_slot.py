"""Where one tensor of a checkpoint goes: the contract between layers (which own parameters) and
loaders.

Layers say which checkpoint tensors they need and into which views of their parameters; loaders know
files and names, and nothing of layers.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """One destination: `target` receives `source.narrow(dim, start, target.shape[dim])`."""

    target: torch.Tensor
    dim: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A checkpoint tensor of `shape` (whole, before any tensor-parallel cut) and the views that it
    fills.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, target: torch.Tensor) -> "WeightSlot":
        """The tensor fills `target` exactly."""
        return cls(tuple(target.shape), (Part(target),))

    def fill(self, source: torch.Tensor) -> None:
        """Copy `source` (of `shape`, any floating dtype) into the parameters, casting once."""
        for part in self.parts:
            length = part.target.shape[part.dim]
            part.target.copy_(source.narrow(part.dim, part.start, length))
