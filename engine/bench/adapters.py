"""Random adapters on all seven projections of a shape, as PEFT tensors.

Knows nothing of engines.
"""

from typing import Any

import torch

from engine.bench.shapes import MODULES, ModelShape

_SCALE = 0.02


class AdapterMaker:
    """Cuts adapters out of one buffer of random numbers, each from another place, so that many are
    made quickly and none equals another.
    """

    def __init__(self, shape: ModelShape, max_rank: int, seed: int = 0) -> None:
        self._shape = shape
        widths = [own.inputs for own in shape.projections]
        widths += [width for own in shape.projections for width in own.widths]
        self._largest = max_rank * max(widths)
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(4 * self._largest + 8191, generator=generator)
        self._numbers = numbers.mul_(_SCALE).bfloat16()

    def tensors(self, index: int, rank: int) -> dict[str, torch.Tensor]:
        """Views of the buffer, bfloat16 as most files are."""
        found: dict[str, torch.Tensor] = {}
        for layer in range(self._shape.layers):
            for own in self._shape.projections:
                for module, width in zip(MODULES[own.name], own.widths, strict=True):
                    key = f"base_model.model.model.layers.{layer}.{module}"
                    place = 7919 * index + len(found)
                    found[f"{key}.lora_A.weight"] = self._cut(place, rank, own.inputs)
                    found[f"{key}.lora_B.weight"] = self._cut(place + 1, width, rank)
        return found

    def config(self, rank: int) -> dict[str, Any]:
        modules = [module.rpartition(".")[2] for group in MODULES.values() for module in group]
        return {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": modules,
            "bias": "none",
        }

    def _cut(self, place: int, rows: int, columns: int) -> torch.Tensor:
        start = place * 104729 % (self._numbers.numel() - self._largest)
        return self._numbers[start : start + rows * columns].view(rows, columns)
