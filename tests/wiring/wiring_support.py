"""Helpers of the wiring tests: containers from changed source text, calls that were made, parts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from dependency_injector import containers, providers

from engine.config import DeviceConfig, EngineConfig, MemoryConfig
from engine.device import Device
from engine.errors import WiringError
from engine.memory.kv_pool import KVPool
from engine.memory.ledger import MemoryLedger
from engine.memory.pages import PageAllocator
from engine.memory.plan import MemoryPlan
from engine.scheduling.scheduler import Scheduler
from engine.wiring import build, check

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "containers.py").read_text()
Change = tuple[str, str]


def changed_source(*changes: Change) -> str:
    """The text of containers.py after replacing each `old`, which must stand there once."""
    source = SOURCE
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in containers.py"
        source = source.replace(old, new)
    return source


def container_of(source: str) -> Any:
    """The EngineContainer class that `source` defines."""
    module = ModuleType("changed_containers")
    exec(compile(source, "changed_containers.py", "exec"), module.__dict__)
    return module.EngineContainer


@contextmanager
def calls_into(container_class: Any) -> Iterator[list[str]]:
    """Names of the container's providers whose class or function was called meanwhile."""
    names = {}
    for name, provider in container_class.providers.items():
        target = getattr(provider, "provides", None)
        function = target.__init__ if isinstance(target, type) else target
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            names[code] = name
    called: list[str] = []

    def watch(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code in names:
            called.append(names[frame.f_code])

    sys.setprofile(watch)
    try:
        yield called
    finally:
        sys.setprofile(None)


def refusal(container_class: Any, config: EngineConfig | None = None) -> list[str]:
    """Lines of the WiringError that `build` raises; nothing of the container may be built."""
    with calls_into(container_class) as called:
        try:
            build(config or EngineConfig(), container_class)
        except WiringError as error:
            assert called == []
            return str(error).splitlines()
    raise AssertionError("the container was accepted")


def faults(container: Any) -> list[str]:
    """Lines of the WiringError that `check` raises, none if it does not."""
    try:
        check(container)
    except WiringError as error:
        return str(error).splitlines()
    return []


def edges(container: Any) -> list[tuple[str, str]]:
    """(provider, keyword) of every keyword that a Singleton of the container passes."""
    return [
        (name, keyword)
        for name, provider in container.providers.items()
        if isinstance(provider, providers.Singleton)
        for keyword in provider.kwargs
    ]


# ---------------------------------------------------------------------- a user's components


class Buffers:
    """Reserves before the plan."""

    def __init__(self, ledger: MemoryLedger, size: int, label: str = "buffers") -> None:
        self.receipt = ledger.reserve(label, size, "buffers of one's own")


class LateBuffers:
    """Reserves after the plan: it wants the pool first."""

    def __init__(self, ledger: MemoryLedger, kv_pool: KVPool) -> None:
        self.receipt = ledger.reserve("late_buffers", kv_pool.num_bytes, "too late")


class SilentBuffers:
    """Reserves and keeps no receipt."""

    def __init__(self, ledger: MemoryLedger) -> None:
        ledger.reserve("silent", 1, "without a trace")


class PageWatch:
    """Reserves nothing."""

    def __init__(self, pages: PageAllocator, limits: dict[str, int], every: float = 1.0) -> None:
        self.pages = pages
        self.limits = limits


class EngineWatch:
    """Takes what is built last."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine


class Follower:
    """Takes another component by its name."""

    def __init__(self, first: Buffers) -> None:
        self.first = first


class Misspelt:
    """Takes what nothing in the container is called."""

    def __init__(self, kvpool: KVPool) -> None: ...


class PatientScheduler(Scheduler):
    """A Scheduler."""


class DemandingScheduler(Scheduler):
    """Takes other things than a Scheduler does."""

    def __init__(self, pages: Any, lora_manager: Any, clock: Any, walls: Any = None) -> None: ...


class Unrelated:
    """Neither a scheduler nor anything else of the engine's."""


# ---------------------------------------------------------------------- a container without a model


class Pool(KVPool):
    """Sized by the plan, without a model."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self.num_pages = plan.kv_bytes
        self.page_size = 1


class Served:
    """Stands for the engine."""

    components: dict[str, object]

    def __init__(self, kv_pool: KVPool, pages: PageAllocator) -> None:
        self.kv_pool = kv_pool


class SmallContainer(containers.DeclarativeContainer):
    """Reserve, size and run with the engine's own ledger and plan, and nothing to load."""

    config = providers.Dependency(instance_of=EngineConfig)
    cfg = config.provided
    device = providers.Singleton(Device, cfg=cfg.device)
    ledger = providers.Singleton(MemoryLedger, cfg=cfg.memory, device=device)
    memory_plan = providers.Singleton(MemoryPlan.build, ledger=ledger, receipts=providers.List())
    kv_pool = providers.Singleton(Pool, plan=memory_plan)
    pages = providers.Singleton(PageAllocator, kv_pool=kv_pool)
    engine = providers.Singleton(Served, kv_pool=kv_pool, pages=pages)


def small_config(**components: Any) -> EngineConfig:
    """1000 bytes of memory; `components` as in the config."""
    return EngineConfig(
        device=DeviceConfig(memory_bytes=1000),
        memory=MemoryConfig(fraction=1.0),
        components=components,
    )
