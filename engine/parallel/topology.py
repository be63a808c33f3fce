"""Which part of a tensor-parallel group this process is. One process for now: tp_rank 0 of 1."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """`tp_rank` of `tp_size` processes that share one model."""

    tp_rank: int = 0
    tp_size: int = 1

    def shard(self, total: int, what: str) -> tuple[int, int]:
        """Start and length of this process's part of `total` units, which must divide evenly."""
        assert total % self.tp_size == 0, (
            f"{what}: {total} does not divide by tp_size {self.tp_size}"
        )
        length = total // self.tp_size
        return self.tp_rank * length, length
