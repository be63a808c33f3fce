"""What tests of several folders share: data, engines of tiny models, a PEFT adapter maker."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from engine import wiring
from engine.config import (
    DeviceConfig,
    DType,
    EngineConfig,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.serving.engine import Engine

# Without a card Triton interprets its kernels; it must know before they are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DATA = Path(__file__).parent / "data"
EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """Tests assert on messages, they do not print them."""
    logger.remove()


@pytest.fixture(scope="session")
def bases() -> Path:
    """Folder of tiny base models: llama, llama_tied, qwen2_bias, phi3_fused."""
    return DATA / "bases"


@pytest.fixture(scope="session")
def cases() -> Path:
    """Folder of adapter cases with expected numbers."""
    return DATA / "cases"


def tiny_config(path: Path, **changes: Any) -> EngineConfig:
    """A config for a tiny model: 64 MiB, no adapters; `lora`, `scheduler`, `memory`, `model` take
    dicts.
    """
    lora = {"max_loras_per_batch": 4, "max_lora_rank": 64} | changes.pop("lora", {})
    scheduler = {"max_running_requests": 16, "max_step_tokens": 64} | changes.pop("scheduler", {})
    memory = {"fraction": 1.0} | changes.pop("memory", {})
    model = {"dtype": DType.float32} | changes.pop("model", {})
    memory_bytes = changes.pop("memory_bytes", 64 << 20)
    return EngineConfig(
        model=ModelConfig(path=str(path), **model),
        device=DeviceConfig(memory_bytes=memory_bytes),
        lora=LoRAConfig(**lora),
        memory=MemoryConfig(**memory),
        scheduler=SchedulerConfig(**scheduler),
        **changes,
    )


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    """Build engines; their containers are reset afterwards."""
    containers = []

    def make(path: Path, **changes: Any) -> Engine:
        container = wiring.build(tiny_config(path, **changes))
        containers.append(container)
        return container.engine()

    yield make
    for container in containers:
        container.reset_singletons()
