"""What every layer needs to be built: where its parameters live, their dtype, the shard and the
ops.
"""

from dataclasses import dataclass

import torch

from engine.layers.opset import OpSet
from engine.parallel.topology import Topology


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Shared by all layers of a model; `device` is `meta` while sizes are counted."""

    device: torch.device
    dtype: torch.dtype
    topology: Topology
    ops: OpSet

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialized parameter of `shape`."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
