"""The largest step runs before there is a KV pool, with adapters in every slot, and leaves nothing
behind.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import tiny_config

from engine import wiring
from engine.config import KernelsConfig, KernelSet
from engine.lora.adapter import Part
from engine.runtime.step_probe import StepProbe
from engine.serving.engine import Engine

NEEDS_INTERPRETER = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's tensors")


@pytest.mark.parametrize(
    "kernels", [KernelSet.reference, pytest.param(KernelSet.triton, marks=NEEDS_INTERPRETER)]
)
def test_the_largest_step_runs(kernels: KernelSet, bases: Path) -> None:
    chosen = KernelsConfig(ops=kernels, attention=kernels)
    config = tiny_config(
        bases / "llama",
        kernels=chosen,
        memory_bytes=256 << 20,
        scheduler={"max_step_tokens": 40, "max_running_requests": 5},
        lora={"max_loras_per_batch": 3, "max_lora_rank": 16},
    )
    container = wiring.build(config)
    probe = StepProbe(
        config.scheduler,
        config.memory,
        chosen,
        container.model(),
        container.lora_manager(),
        container.attention_space(),
        container.device(),
    )
    assert probe.run().shape == (5,)
    container.reset_singletons()


def test_every_slot_is_in_use(bases: Path, make_engine: Callable[..., Engine]) -> None:
    lora = {"max_loras_per_batch": 3, "max_lora_rank": 16, "pool_rank_rows": 56}
    engine = make_engine(bases / "llama", lora=lora, memory_bytes=128 << 20)
    rows = engine.lora_manager._residency.full_rows(40)
    assert [count for _, count in rows] == [13, 13, 14]
    assert [(use[0][0].row_start, use[0][0].row_stop) for use, _ in rows] == [
        (0, 16),
        (16, 32),
        (32, 48),
    ]
    assert engine.lora_manager.bind_full(Part.layers, 40) is not None


def test_no_slots_no_adapters(bases: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(bases / "llama", lora={"max_loras_per_batch": 0}, memory_bytes=128 << 20)
    assert engine.lora_manager.bind_full(Part.layers, 40) is None
    assert engine.lora_manager._residency.full_rows(40) == []
