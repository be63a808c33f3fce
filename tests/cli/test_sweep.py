"""The table of a sweep, and a job that frees what it built however it ends."""

import gc
import math
import weakref
from typing import Any

import pytest
from omegaconf import OmegaConf

from engine.cli import job
from engine.cli.sweep import JobRow, Sweep
from engine.commands.result import JobResult
from engine.config import EngineConfig
from engine.errors import CapacityError


def test_table() -> None:
    sweep = Sweep(
        [
            JobRow(["a.b=4", "c=1"], JobResult(1234.56, 40960)),
            JobRow(["a.b=16", "c=1"], JobResult(None, 8)),
            JobRow(["a.b=-1", "c=1"], reason="a.b: got -1"),
        ]
    )
    assert sweep.num_failed == 1
    assert math.isnan(sweep.rows[2].score) and sweep.rows[0].score == 1234.56
    assert sweep.table().splitlines() == [
        "job  overrides  tokens/s  KV tokens  outcome",
        "  0  a.b=4       1,234.6     40,960  ok",
        "  1  a.b=16            -          8  ok",
        "  2  a.b=-1            -          -  failed: a.b: got -1",
    ]


class Big:
    """Stands for a tensor: weak references can tell whether it is alive."""


class Container:
    """Holds one big thing in a singleton, in a cycle as real containers do."""

    def __init__(self) -> None:
        self.big: Any = Big()
        self.me = self

    def reset_singletons(self) -> None:
        self.big = None


@pytest.mark.parametrize("fails", ["nowhere", "build", "command"])
def test_nothing_outlives_a_job(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []

    def build(config: EngineConfig) -> Container:
        container = Container()
        alive.extend([weakref.ref(container), weakref.ref(container.big)])
        if fails == "build":
            raise CapacityError("no room")
        return container

    def command(container: Container) -> JobResult:
        tensor = container.big
        if fails == "command":
            raise CapacityError(f"no room beside {tensor is not None}")
        return JobResult(2.0, 3)

    import engine.commands
    import engine.wiring

    monkeypatch.setattr(engine.wiring, "build", build)
    monkeypatch.setattr(engine.commands, "find_command", lambda name: command)
    cfg = OmegaConf.structured(EngineConfig)
    kept: BaseException | None = None
    gc.disable()
    try:
        try:
            assert job.run_job(cfg) == JobResult(2.0, 3)
        except CapacityError as error:
            kept = error  # as a sweep does until its end
        assert (kept is None) == (fails == "nowhere")
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()
