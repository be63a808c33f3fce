"""What a kernel's benchmark is: a call, what it must give, the bytes and operations that it cannot
do without, and how it is measured. Knows no kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.bench.machine import Machine
from engine.bench.timing import Timer


@dataclass(frozen=True, slots=True)
class Prepared:
    """Tensors are made. `deviation` runs call and reference once: see `deviation` below.

    `num_bytes`: each input read once, each output written once. `peer`: torch's own way, by name.
    """

    call: Callable[[], object]
    deviation: Callable[[], float]
    num_bytes: int
    num_flops: int
    peer: Callable[[], object] | None = None
    peer_name: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `shape` in words."""

    kernel: str
    shape: str
    prepare: Callable[[], Prepared]


def deviation(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference over the largest expected number, worst of the pairs; inf if a number
    is not finite.
    """
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        difference = (one.float() - other.float()).abs().max()
        ratio = float(difference / other.float().abs().max().clamp_min(1e-30))
        worst = max(worst, ratio) if ratio == ratio else float("inf")
    return worst


@torch.inference_mode()
def measure(case: Case, timer: Timer, machine: Machine) -> dict[str, Any]:
    """Numbers of one row. Rates and their share of the ceiling are those of a cold cache: of bytes
    or of operations, whichever would take longer at its ceiling.
    """
    prepared = case.prepare()
    off_by = prepared.deviation()
    timing = timer(prepared.call)
    seconds = timing.cold_us / 1e6
    floors = (prepared.num_bytes / machine.copy, prepared.num_flops / machine.matmul)
    by_bytes = floors[0] >= floors[1]
    peer = timer(prepared.peer) if prepared.peer is not None else None
    return {
        "deviation": off_by,
        "warm_us": timing.warm_us,
        "cold_us": timing.cold_us,
        "eager": timing.eager,
        "rate": (prepared.num_bytes if by_bytes else prepared.num_flops) / seconds / 1e9,
        "by_bytes": by_bytes,
        "share": max(floors) / seconds,
        "peer": prepared.peer_name,
        "peer_us": None if peer is None else peer.cold_us,
        "peer_eager": peer is not None and peer.eager,
    }
