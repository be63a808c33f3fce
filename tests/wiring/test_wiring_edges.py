"""Every wire of the real container carries weight: dropped, made lazy or replaced, it is missed."""

from collections.abc import Callable
from typing import Any
from unittest.mock import create_autospec

import pytest
from dependency_injector import providers
from wiring_support import Unrelated, edges, faults

from engine.config import EngineConfig
from engine.containers import EngineContainer
from engine.lora.manager import LoRAManager
from engine.memory.kv_pool import KVPool
from engine.memory.plan import MemoryPlan
from engine.runtime.runner import ModelRunner
from engine.runtime.workspace import Workspace
from engine.wiring import build

MIN_EDGES = 45  # what there is today; a container that lost half of them would not be tested

Spoil = Callable[[Any, str], None]


def drop(provider: Any, keyword: str) -> None:
    kept = {key: value for key, value in provider.kwargs.items() if key != keyword}
    provider.set_kwargs(**kept)


def make_lazy(provider: Any, keyword: str) -> None:
    provider.add_kwargs(**{keyword: provider.kwargs[keyword].provider})


def replace(provider: Any, keyword: str) -> None:
    provider.add_kwargs(**{keyword: providers.Singleton(Unrelated)})


@pytest.mark.parametrize("spoil", [drop, make_lazy, replace])
def test_every_edge_is_noticed(spoil: Spoil) -> None:
    wires = edges(EngineContainer)
    assert len(wires) >= MIN_EDGES
    unnoticed = []
    for name, keyword in wires:
        container: Any = EngineContainer(config=EngineConfig())
        spoil(container.providers[name], keyword)
        if not any(name in line and keyword in line for line in faults(container)):
            unnoticed.append((name, keyword))
    assert unnoticed == []


def test_every_receipt_is_noticed() -> None:
    receipts = EngineContainer.memory_plan.kwargs["receipts"].args
    assert len(receipts) == len({receipt.provides.provides for receipt in receipts}) >= 3
    for index in range(len(receipts)):
        container: Any = EngineContainer(config=EngineConfig())
        given = container.memory_plan.kwargs["receipts"]
        dropped = given.args[index].provides.provides
        given.set_args(*given.args[:index], *given.args[index + 1 :])
        name = next(key for key, value in container.providers.items() if value is dropped)
        assert any(line.startswith(f"{name}: reserves memory") for line in faults(container))


def test_fakes_count_as_what_they_stand_for() -> None:
    container = build(EngineConfig())
    container.lora_manager.override(create_autospec(LoRAManager, instance=True))
    container.kv_pool.override(create_autospec(KVPool, instance=True))
    assert faults(container) == []
    container.lora_manager.override(create_autospec(KVPool, instance=True))
    assert "runner: ModelRunner(lora_manager) takes LoRAManager, lora_manager is a KVPool" in (
        faults(container)
    )
    container.lora_manager.reset_override()
    assert faults(container) == []


def test_a_plan_that_is_given_seals_nothing() -> None:
    container = build(EngineConfig())
    container.memory_plan.override(create_autospec(MemoryPlan, instance=True))
    assert faults(container) == []


def test_an_override_is_checked_like_the_original() -> None:
    class GreedyWorkspace(Workspace):
        def __init__(self, ledger: Any, kv_pool: KVPool, **others: Any) -> None: ...

    container = build(EngineConfig())
    container.workspace.set_provides(GreedyWorkspace)
    assert faults(container) == [
        "workspace: GreedyWorkspace needs 'kv_pool', which nothing gives; wire kv_pool=kv_pool"
    ]
    container.workspace.override(
        providers.Singleton(GreedyWorkspace, ledger=container.ledger, kv_pool=container.kv_pool)
    )
    assert faults(container) == [
        "workspace: needs itself: workspace -> kv_pool -> memory_plan -> workspace"
    ]


def test_a_fake_class_keeps_the_wires() -> None:
    container = build(EngineConfig())
    container.runner.set_provides(create_autospec(ModelRunner))
    assert faults(container) == []
    container.runner.add_kwargs(adapters=3)
    assert len(faults(container)) == 1 and "has no parameter 'adapters'" in faults(container)[0]
