"""Binds a step's rows to the rank pool, and keeps what was bound last: decoding binds once and not
per token.
"""

from collections.abc import Sequence

import torch

from engine.kernels.lora import LoRAWork
from engine.lora.adapter import Part
from engine.lora.batch import Placement, Portion, bind_work

Row = tuple[Sequence[tuple[Placement, float]], int]


class StepBinder:
    """One binding per part of the model, valid as long as the same rows come."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._bound: dict[Part, tuple[tuple[Portion, ...], LoRAWork | None]] = {}

    def bind(self, part: Part, rows: Sequence[Row]) -> LoRAWork | None:
        """`rows`: (placement, weight) of each of the row's adapters, and its number of tokens."""
        key = _portions(rows)
        if part not in self._bound or self._bound[part][0] != key:
            self._bound[part] = (key, bind_work(part, key, self._device, self._dtype))
        return self._bound[part][1]


def _portions(rows: Sequence[Row]) -> tuple[Portion, ...]:
    """Adapters by token range, neighbours of the same one and only adapter joined."""
    portions: list[Portion] = []
    token = 0
    for uses, num_tokens in rows:
        start, token = token, token + num_tokens
        alone = len(uses) == 1
        for placement, weight in uses:
            last = portions[-1] if portions else None
            if (
                last is not None
                and alone
                and last.alone
                and last.placement is placement
                and last.weight == weight
                and last.stop == start
            ):
                portions.pop()
                portions.append(Portion(last.start, token, placement, weight))
            else:
                portions.append(Portion(start, token, placement, weight, alone))
    return tuple(portions)
