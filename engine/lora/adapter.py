"""An adapter in host memory: LoRA pairs by the projection of the base that they change."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """A projection of the base by its split name, "model.layers.0.self_attn.q_proj"."""

    module: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """delta(x) = scaling * b @ a @ x; `a` [rank, in], `b` [out, rank], dtypes as stored."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """Pairs by split module name. A pair of a fused module counts once in `num_pairs_read`."""

    pairs: Mapping[str, LoRAPair]
    num_pairs_read: int
    num_pairs_applied: int

    @property
    def rank(self) -> int:
        """The largest rank of all pairs."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored tensors; what members of a fused pair share counts once."""
        tensors = {}
        for pair in self.pairs.values():
            for tensor in (pair.a, pair.b):
                tensors[tensor.data_ptr()] = tensor.nbytes
        return sum(tensors.values())

    def describe(self) -> str:
        """The load report: pairs, modules, layers, ranks, bytes."""
        ranks = sorted({pair.rank for pair in self.pairs.values()})
        modules = sorted({name.rpartition(".")[2] for name in self.pairs})
        layers = {name.split(".")[2] for name in self.pairs}
        spread = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        return (
            f"{self.num_pairs_applied} of {self.num_pairs_read} pairs applied, "
            f"{', '.join(modules)} in {len(layers)} layers, rank {spread}, {self.num_bytes:,} bytes"
        )
