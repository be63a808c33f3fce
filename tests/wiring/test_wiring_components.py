"""Classes of one's own: replacing a component, adding one, and what is said if that fails."""

from pathlib import Path
from typing import Any

import pytest
from wiring_support import (
    Buffers,
    PageWatch,
    PatientScheduler,
    SmallContainer,
    calls_into,
    small_config,
)

from engine.config import (
    DeviceConfig,
    DType,
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.containers import EngineContainer
from engine.errors import CapacityError, ConfigError, WiringError
from engine.scheduling.scheduler import Scheduler
from engine.wiring import Component, build, check

BUFFERS = {"_target_": "wiring_support.Buffers", "size": 300}
WATCH = {"_target_": "wiring_support.PageWatch", "limits": {"low": 1}}


def small(**components: Any) -> Any:
    return build(small_config(**components), SmallContainer)


def refused(error: type[Exception], **components: Any) -> str:
    with calls_into(SmallContainer) as called, pytest.raises(error) as raised:
        small(**components)
    assert called == []
    return str(raised.value)


# ---------------------------------------------------------------------- replaced


def scheduler_by(target: str) -> Any:
    return build(EngineConfig(scheduler=SchedulerConfig(_target_=target)))


def test_a_component_is_replaced_in_its_own_container_only() -> None:
    assert scheduler_by("wiring_support.PatientScheduler").scheduler.provides is PatientScheduler
    assert build(EngineConfig()).scheduler.provides is Scheduler


@pytest.mark.parametrize(
    "target, message",
    [
        (
            "wiring_support.Unrelated",
            "scheduler._target_: wiring_support.Unrelated is not a Scheduler; derive it from "
            "engine.scheduling.scheduler.Scheduler",
        ),
        (
            "no_such_package.Scheduler",
            "scheduler._target_: cannot import 'no_such_package.Scheduler' (ModuleNotFoundError: "
            "No module named 'no_such_package'); give package.module.Class",
        ),
        (
            "wiring_support.PatentScheduler",
            "scheduler._target_: module 'wiring_support' has no 'PatentScheduler'; did you mean "
            "'PatientScheduler'?",
        ),
        (
            "wiring_support.small_config",
            "scheduler._target_: 'wiring_support.small_config' is a function, expected a class",
        ),
        ("Mine", "scheduler._target_: got 'Mine', expected package.module.Class"),
    ],
)
def test_a_replacement_that_cannot_be(target: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        scheduler_by(target)
    assert str(raised.value) == message


def test_a_replacement_is_checked_like_the_original() -> None:
    with pytest.raises(WiringError) as raised:
        scheduler_by("wiring_support.DemandingScheduler")
    assert str(raised.value).splitlines() == [
        "scheduler: DemandingScheduler has no parameter 'cfg'",
        "scheduler: DemandingScheduler has no parameter 'prefix_cache'",
        "scheduler: DemandingScheduler needs 'clock', which nothing gives",
    ]


def test_every_target_of_the_config_has_its_component() -> None:
    config = EngineConfig()
    fields = (name for name in EngineConfig.__dataclass_fields__)
    with_target = [name for name in fields if hasattr(getattr(config, name), "_target_")]
    found = [
        provider.kwargs["cfg"].name
        for provider in EngineContainer.providers.values()
        if isinstance(provider, Component)
    ]
    assert sorted(found) == sorted(with_target) != []


# ---------------------------------------------------------------------- added


def test_a_reserver_is_obeyed_without_registration() -> None:
    container = small(mine=BUFFERS)
    assert container.kv_pool().num_pages == 700
    (receipt,) = container.memory_plan().receipts
    assert (receipt.owner, receipt.num_bytes) == ("buffers", 300)
    assert isinstance(container.engine().components["mine"], Buffers)
    assert small().memory_plan().receipts == ()


def test_one_that_reserves_nothing_is_built_with_the_engine() -> None:
    container = small(mine=WATCH)
    served = container.engine()
    watch = served.components["mine"]
    assert isinstance(watch, PageWatch) and watch.pages is container.pages()
    assert watch.limits is container.config().components["mine"]["limits"]


def test_components_may_take_each_other() -> None:
    container = small(mine={"_target_": "wiring_support.Follower"}, first=BUFFERS)
    assert container.engine().components["mine"].first is container.first()


def test_the_ledger_holds_a_component_to_the_budget() -> None:
    container = small(mine=BUFFERS | {"size": 2000})
    with pytest.raises(CapacityError, match="buffers needs"):
        container.engine()


@pytest.mark.parametrize(
    "entry, message",
    [
        (
            {"_target_": "wiring_support.LateBuffers"},
            "mine: reserves memory, so memory_plan must need it; it is the other way round: "
            "mine -> kv_pool -> memory_plan",
        ),
        (
            {"_target_": "wiring_support.SilentBuffers"},
            "mine: reserves memory, but SilentBuffers has no attribute 'receipt'; keep there what "
            "ledger.reserve returns",
        ),
        (
            {"_target_": "wiring_support.Buffers", "sizes": 3},
            "mine: Buffers has no parameter 'sizes'; did you mean 'size'?",
        ),
        (
            {"_target_": "wiring_support.Buffers"},
            "mine: Buffers needs 'size', which nothing gives",
        ),
        (BUFFERS | {"size": "three"}, "mine: Buffers(size) takes int, got str 'three'"),
        (
            {"_target_": "wiring_support.Misspelt"},
            "mine: Misspelt needs 'kvpool', which nothing gives; did you mean 'kv_pool'?",
        ),
    ],
)
def test_a_component_that_is_wired_wrongly(entry: dict[str, Any], message: str) -> None:
    assert refused(WiringError, mine=entry) == message


@pytest.mark.parametrize(
    "components, message",
    [
        (
            {"mine": {"size": 3}},
            "components.mine: got {'size': 3}, expected {_target_: package.module.Class, ...}",
        ),
        (
            {"mine": {"_target_": "nowhere.Mine"}},
            "components.mine._target_: cannot import "
            "'nowhere.Mine' (ModuleNotFoundError: No module named 'nowhere'); give "
            "package.module.Class",
        ),
        (
            {"pages": WATCH},
            "components.pages: the engine has a 'pages' of its own; choose another name",
        ),
        (
            {"wire": WATCH},
            "components.wire: 'wire' cannot be the name of a component; choose another",
        ),
        (
            {"mine": {"_target_": "wiring_support.EngineWatch"}},
            "components.mine: EngineWatch takes "
            "'engine', which is built from all components; take parts of it (kv_pool, pages)",
        ),
    ],
)
def test_a_component_that_cannot_be_added(components: dict[str, Any], message: str) -> None:
    assert refused(ConfigError, **components) == message


def test_a_component_of_the_engine_is_replaced_by_its_target() -> None:
    with pytest.raises(ConfigError) as raised:
        build(EngineConfig(components={"scheduler": WATCH}))
    assert str(raised.value) == (
        "components.scheduler: the engine has a 'scheduler' of its own; replace it by "
        "scheduler._target_"
    )


def test_on_the_real_container() -> None:
    container: Any = build(EngineConfig(components={"mine": BUFFERS, "watch": WATCH}))
    check(container)
    assert len(container.memory_plan.kwargs["receipts"].args) == (
        len(EngineContainer.memory_plan.kwargs["receipts"].args) + 1
    )


def test_a_real_start(bases: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(path=str(bases / "llama"), dtype=DType.float32),
        device=DeviceConfig(memory_bytes=64 << 20),
        memory=MemoryConfig(fraction=1.0),
        components={"mine": BUFFERS, "watch": WATCH},
    )
    with calls_into(EngineContainer) as called:
        container: Any = build(config)
        assert called == []
        engine = container.engine()
    order = ("ledger", "model", "lora_manager", "memory_plan", "kv_pool", "engine")
    assert [name for name in called if name in order] == list(order)
    owners = [receipt.owner for receipt in container.memory_plan().receipts]
    assert owners[-1] == "buffers" and len(owners) == len(set(owners)) >= 4
    assert engine.components == {"mine": container.mine(), "watch": container.watch()}
    container.reset_singletons()
