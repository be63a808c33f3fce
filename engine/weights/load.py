"""Fills a model's parameters from a checkpoint, one tensor at a time: complete, or refused.

Knows slots and names; where tensors come from is the checkpoint's business.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.errors import ModelError, first_few
from engine.layers.weight_slot import WeightSlot
from engine.weights.checkpoint import Checkpoint

TIED_HEAD = "lm_head.weight"
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was read: tensors, their bytes in the checkpoint, and the seconds it took."""

    num_tensors: int
    num_bytes: int
    seconds: float


def load_weights(slots: Mapping[str, WeightSlot], checkpoint: Checkpoint) -> LoadReport:
    """Fill every slot. Raises one ModelError that lists missing, surplus and mis-shaped tensors.

    Peak memory beyond the parameters: one tensor of the checkpoint. Buffers that a model computes
    itself (rotary frequencies) and a tied model's copy of its head are passed over.
    """
    started = time.perf_counter()
    waiting = dict(slots)
    surplus: list[str] = []
    misshaped: list[str] = []
    num_tensors = num_bytes = 0
    for name, tensor in checkpoint.tensors():
        slot = waiting.pop(name, None)
        if slot is None:
            if not _is_computed(name, slots):
                surplus.append(name)
            continue
        if tuple(tensor.shape) != slot.shape:
            misshaped.append(f"{name} is {list(tensor.shape)}, expected {list(slot.shape)}")
            continue
        slot.fill(tensor)
        num_tensors += 1
        num_bytes += tensor.nbytes
    faults = [
        _listed("missing", list(waiting)),
        _listed("surplus", surplus),
        _listed("mis-shaped", misshaped),
    ]
    if any(faults):
        shown = "; ".join(fault for fault in faults if fault)
        raise ModelError(
            f"{checkpoint.name}: the weights do not fit config.json: {shown}; use the files of one "
            "and the same model"
        )
    return LoadReport(num_tensors, num_bytes, time.perf_counter() - started)


def fill_randomly(slots: Mapping[str, WeightSlot], seed: int) -> LoadReport:
    """Random weights of plausible size: normal with deviation 0.02, norms one, biases zero."""
    started = time.perf_counter()
    targets = [part.target for slot in slots.values() for part in slot.parts]
    generator: torch.Generator | None = None
    for name, slot in slots.items():
        for part in slot.parts:
            if generator is None or generator.device != part.target.device:
                generator = torch.Generator(part.target.device).manual_seed(seed)
            if name.endswith("norm.weight"):
                part.target.fill_(1.0)
            elif name.endswith(".bias"):
                part.target.zero_()
            else:
                part.target.normal_(0.0, 0.02, generator=generator)
    num_bytes = sum(target.nbytes for target in targets)
    return LoadReport(len(slots), num_bytes, time.perf_counter() - started)


def _is_computed(name: str, slots: Mapping[str, WeightSlot]) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (name == TIED_HEAD and TIED_HEAD not in slots)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} {what} ({first_few(names, NUM_SHOWN)})"
