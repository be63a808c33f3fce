"""Engines for bench_decode.py and bench_adapter_load.py: dummy weights of a shape, overrides as on
the command line, random adapters loaded from tensors.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bench.shapes import ModelShape

ROW_ALIGNMENT = 16
ON_CARD = (
    "device=cuda",
    "kernels=triton",
    "graph=decode",
    "memory.fraction=0.85",
    "scheduler.max_running_requests=128",
    "scheduler.max_step_tokens=16384",
)
ON_CPU = (
    "device=cpu",
    "device.memory_bytes=268435456",
    "kernels=triton",
    "memory.fraction=1.0",
    "scheduler.max_running_requests=8",
    "scheduler.max_step_tokens=64",
)


@dataclass(frozen=True)
class EngineKind:
    """An engine with adapters of `ranks` loaded (none: adapters off) and room for `spare` ones; how
    it is called.
    """

    name: str
    words: str
    ranks: tuple[int, ...] = ()
    max_rank: int = 16
    spare: tuple[int, ...] = ()

    def overrides(self) -> list[str]:
        """Pool rows are as many as the adapters need."""
        ranks = self.ranks + self.spare
        rows = sum(-(-rank // ROW_ALIGNMENT) * ROW_ALIGNMENT for rank in ranks)
        return [
            "lora=default",
            f"lora.max_loras_per_batch={len(ranks)}",
            f"lora.max_lora_rank={self.max_rank}",
            f"lora.pool_rank_rows={max(rows, self.max_rank)}",
        ]


@dataclass
class Served:
    """A running engine, its adapters' names, and what its start took."""

    container: Any
    engine: Any
    names: list[str]
    start_s: float
    load_s: float


def serve(
    kind: EngineKind,
    shape: ModelShape,
    folder: Path,
    own: Sequence[str],
    *,
    smoke: bool,
    started: float,
) -> Served:
    """Build an engine and load its adapters. `own` overrides win; `started`: time.perf_counter()
    when the process began.
    """
    from engine import wiring
    from engine.bench.adapters import AdapterMaker

    (folder / "config.json").write_text(json.dumps(shape.config()))
    fixed = ["model=dummy", f"model.path={folder}", "memory.prefix_cache=false"]
    fixed += ["log_level=warning", *(ON_CPU if smoke else ON_CARD), *kind.overrides()]
    container = wiring.build(compose([*fixed, *own]))
    engine = container.engine()
    start_s = time.perf_counter() - started
    maker = AdapterMaker(shape, max(kind.ranks, default=1))
    names = [f"adapter{index}-r{rank}" for index, rank in enumerate(kind.ranks)]
    for index, (name, rank) in enumerate(zip(names, kind.ranks, strict=True)):
        engine.load_adapter_from_tensors(name, maker.tensors(index, rank), maker.config(rank))
    return Served(container, engine, names, start_s, time.perf_counter() - started - start_s)


def compose(overrides: Sequence[str]) -> Any:
    """The EngineConfig of Hydra overrides; of several for one key the last one counts."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from loguru import logger
    from omegaconf import OmegaConf

    from engine.cli.schema import register_schema

    last = {override.partition("=")[0].lstrip("+"): override for override in overrides}
    register_schema()
    with initialize_config_module("engine.conf", version_base="1.3"):
        config = OmegaConf.to_object(hydra_compose("config", overrides=list(last.values())))
    logger.remove()
    logger.add(sys.stderr, level=config.log_level.value.upper())
    return config
