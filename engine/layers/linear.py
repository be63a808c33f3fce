"""Linear layers: one matrix for one or several projections of the same input, with an optional
delta.

A layer knows its tensor-parallel shard and the names of its projections in checkpoints; it does not
know what a delta is (the LoRA package attaches one).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from engine.layers.build import BuildContext
from engine.layers.weight_slot import Part, WeightSlot


class Cut(Enum):
    """Which side of the matrix tensor parallelism divides."""

    column = "column"
    row = "row"


@dataclass(frozen=True, slots=True)
class Member:
    """One projection of a layer: its module name in checkpoints and its whole output width."""

    name: str
    width: int


class Delta(ABC):
    """Something that is added to a layer's output. An embedding's x is token ids [T]."""

    @abstractmethod
    def add(self, x: torch.Tensor, y: torch.Tensor, batch: Any) -> None:
        """y [T, O] += delta of x [T, I], in place, for the adapters bound in `batch`."""


class Linear:
    """`weight` [sum of local widths, local in_features], `bias` of the same rows or None."""

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        members: tuple[Member, ...],
        *,
        bias: bool,
        cut: Cut,
        weight: torch.Tensor | None = None,
    ) -> None:
        """`weight`: a tensor to share (one that the layer has no checkpoint slots for)."""
        self.ops = ctx.ops
        self.members = members
        self.cut = cut
        self.total_in_features = in_features
        shard = ctx.topology.shard
        if cut is Cut.column:
            self._in_shard = (0, in_features)
            self._out_shards = [shard(member.width, member.name) for member in members]
        else:
            self._in_shard = shard(in_features, members[0].name)
            self._out_shards = [(0, member.width) for member in members]
        self.widths = tuple(length for _, length in self._out_shards)
        self.weight = ctx.empty(sum(self.widths), self._in_shard[1]) if weight is None else weight
        self.bias = ctx.empty(sum(self.widths)) if bias else None
        self.delta: Delta | None = None

    @property
    def in_features(self) -> int:
        """Local input width."""
        return self._in_shard[1]

    def pack(self) -> None:
        """Put the filled weight into the layout that the ops want; slots are void afterwards."""
        self.weight = self.ops.pack_weight(self.weight)

    def shard_starts(self, index: int) -> tuple[int, int]:
        """Where member `index`'s local inputs and outputs begin in the whole matrix."""
        return self._in_shard[0], self._out_shards[index][0]

    def __call__(self, x: torch.Tensor, lora: Any = None) -> torch.Tensor:
        """x [T, in_features] -> [T, sum(widths)], with the delta of the adapters in `lora`."""
        y = self.ops.linear(x, self.weight, self.bias)
        if self.delta is not None and lora is not None:
            self.delta.add(x, y, lora)
        return y

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """Columns `start`..`stop` of the matrix, [sum(widths), stop - start], whatever its layout.

        Products with unit vectors are exact: every other term is zero.
        """
        units = torch.zeros(
            (stop - start, self.in_features), dtype=self.weight.dtype, device=self.weight.device
        )
        units[:, start:stop].fill_diagonal_(1)
        return self.ops.linear(units, self.weight, None).t()

    def slots(self) -> dict[str, WeightSlot]:
        """Checkpoint tensors, one weight (and bias) per member."""
        slots: dict[str, WeightSlot] = {}
        row = 0
        for member, (start, length) in zip(self.members, self._out_shards, strict=True):
            target = self.weight[row : row + length]
            part = (
                Part(target, 0, start)
                if self.cut is Cut.column
                else Part(target, 1, self._in_shard[0])
            )
            slots[f"{member.name}.weight"] = WeightSlot(
                (member.width, self.total_in_features), (part,)
            )
            if self.bias is not None:
                part = Part(self.bias[row : row + length], 0, start)
                slots[f"{member.name}.bias"] = WeightSlot((member.width,), (part,))
            row += length
        return slots

    def fused_slots(self, name: str) -> dict[str, WeightSlot]:
        """The same parameters from a checkpoint that stores all members as one tensor called
        `name`.
        """
        parts: dict[str, list[Part]] = {"weight": [], "bias": []}
        total = 0
        for member in self.members:
            own = {f"{member.name}.{kind}": kind for kind in parts}
            for key, slot in self.slots().items():
                if key in own:
                    parts[own[key]].extend(
                        Part(p.target, p.dim, total + p.start) for p in slot.parts
                    )
            total += member.width
        shapes = {"weight": (total, self.total_in_features), "bias": (total,)}
        return {
            f"{name}.{kind}": WeightSlot(shapes[kind], tuple(p)) for kind, p in parts.items() if p
        }
