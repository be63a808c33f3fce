"""What the check reads off a graph: all kinds of providers, annotations that help and do not."""

import re
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch
from dependency_injector import containers, providers
from wiring_support import SmallContainer, Unrelated, calls_into, faults, small_config

from engine.commands.result import JobResult
from engine.commands.wiring import run
from engine.config import EngineConfig
from engine.containers import EngineContainer
from engine.memory.ledger import MemoryLedger
from engine.wiring import build, diagram

if TYPE_CHECKING:
    from nowhere import Unknown


class Mode(Enum):
    """A closed choice."""

    fast = "fast"


class HasPages(Protocol):
    """Checked by the names of its members."""

    num_pages: int


class Part:
    """Takes all kinds of values."""

    def __init__(
        self,
        number: float = 0,
        maybe: "Unrelated | None" = None,
        items: Sequence[Unrelated] = (),
        shape: HasPages | None = None,
        unknown: "Unknown | None" = None,
        bare=None,
        **others: int,
    ) -> None: ...


def make_part(name: str = "") -> "Part":
    """A factory function with a return annotation."""
    return Part()


class Wants:
    """Takes a Part."""

    def __init__(self, part: Part, *rest: Any) -> None: ...


class BareReserver:
    """Reserves through a method of the ledger."""

    def __init__(self, reserve: Any) -> None:
        self.receipt = reserve("bare", 1, "")


def small(**added: Any) -> Any:
    container: Any = SmallContainer(config=small_config())
    for name, provider in added.items():
        container.set_provider(name, provider)
    return container


@pytest.mark.parametrize(
    "values",
    [
        {"number": 3},
        {"number": providers.Object(0.5)},
        {"maybe": None},
        {"maybe": providers.Factory(Unrelated)},
        {"items": providers.List(providers.Factory(Unrelated))},
        {"unknown": 3, "bare": 3, "anything": 3},
        {"maybe": providers.Dependency(instance_of=Unrelated, default=Unrelated())},
        {"maybe": providers.Callable(lambda: 3)},
    ],
    ids=str,
)
def test_values_that_fit(values: dict[str, Any]) -> None:
    assert faults(small(part=providers.Singleton(Part, **values))) == []


@pytest.mark.parametrize(
    "values, message",
    [
        ({"number": "3"}, "part: Part(number) takes float, got str '3'"),
        (
            {"number": torch.ones(2, 1)},
            "part: Part(number) takes float, got Tensor tensor([[1.], [1.]])",
        ),
        ({"shape": 3}, "part: Part(shape) takes HasPages | None, got int 3"),
        ({"maybe": 3}, "part: Part(maybe) takes Unrelated | None, got int 3"),
        (
            {"items": providers.List(providers.Object(3))},
            "part: Part(items) takes Unrelated items, got int 3",
        ),
        (
            {"items": providers.Dict(a=providers.Object(3))},
            "part: Part(items) takes collections.abc.Sequence[wiring_support.Unrelated], Dict is "
            "a dict",
        ),
        (
            {"maybe": providers.Callable(make_part)},
            "part: Part(maybe) takes Unrelated | None, part.maybe is a Part",
        ),
        (
            {"maybe": providers.Dependency(instance_of=Unrelated)},
            "part.maybe: nothing is given for this Dependency; give an instance of Unrelated when "
            "the container is made",
        ),
    ],
    ids=str,
)
def test_values_that_do_not_fit(values: dict[str, Any], message: str) -> None:
    assert faults(small(part=providers.Singleton(Part, **values))) == [message]


def test_a_protocol_is_met_by_its_members() -> None:
    container = small()
    container.set_provider("part", providers.Singleton(Part, shape=container.kv_pool))
    assert faults(container) == []


def test_positions_and_factories() -> None:
    part = providers.Factory(make_part)
    assert faults(small(part=part, wants=providers.Singleton(Wants, part, 1, 2))) == []
    assert faults(small(part=part, wants=providers.Singleton(Wants, providers.Object(3)))) == [
        "wants: Wants(part) takes Part, got int 3"
    ]
    assert faults(small(part=providers.Factory(make_part, "a", "b"))) == [
        "part: make_part takes 1 positions, got 2"
    ]


def test_of_a_selector_only_the_chosen_branch_counts() -> None:
    def choose(name: str) -> list[str]:
        container = small(good=providers.Singleton(Part))
        bad = providers.Singleton(Unrelated)
        choice = providers.Selector(providers.Object(name), good=container.good, bad=bad)
        container.set_provider("choice", choice)
        container.set_provider("wants", providers.Singleton(Wants, part=choice))
        return faults(container)

    assert choose("good") == []
    assert choose("bad") == [
        "wants: Wants(part) takes Part, choice is an Unrelated; did you mean good?"
    ]
    assert choose("god") == [
        "choice: 'god' is none of its choices (bad, good); did you mean 'good'?"
    ]


def reserver(container: Any, **wires: Any) -> list[str]:
    container.set_provider("bare", providers.Singleton(BareReserver, **wires))
    return faults(container)


def test_whoever_can_reserve_is_a_reserver() -> None:
    nothing_leads = [
        "bare: reserves memory, so memory_plan must need it; nothing leads from memory_plan to it"
    ]
    for wire in (
        lambda ledger: ledger,
        lambda ledger: ledger.provider,
        lambda ledger: ledger.provided,
        lambda ledger: ledger.provided.reserve,
        lambda ledger: ledger.provided.reserve.call("bare", 1, ""),
        lambda ledger: providers.List(ledger),
        lambda ledger: providers.Dict(books=providers.List(ledger)),
    ):
        container = small()
        assert reserver(container, reserve=wire(container.ledger)) == nothing_leads
    for figure in ("left_bytes", "budget_bytes"):
        container = small()
        assert reserver(container, reserve=getattr(container.ledger.provided, figure)) == []


@pytest.mark.parametrize("kind", [providers.ThreadLocalSingleton, providers.Callable])
def test_what_is_shared_is_made_once(kind: type[Any]) -> None:
    container = small()
    for name in ("ledger", "memory_plan", "kv_pool"):
        original = container.providers[name]
        container.providers[name].override(kind(original.provides, **original.kwargs))
    assert faults(container) == [
        f"{name}: a {kind.__name__} would {does} once per user; make it a Singleton"
        for name, does in (
            ("ledger", "keep books"),
            ("memory_plan", "seal the ledger"),
            ("kv_pool", "allocate"),
        )
    ]


def test_a_ledger_that_is_given_is_the_second_if_another_is_wired() -> None:
    container = small()
    given = object.__new__(MemoryLedger)
    container.set_provider(
        "mine", providers.Singleton(BareReserver, reserve=providers.Object(given))
    )
    assert faults(container)[0] == (
        "mine.reserve: is a second MemoryLedger (wired to mine); memory_plan seals only 'ledger', "
        "wire that one to all"
    )


def test_the_names_that_rules_hang_on() -> None:
    assert faults(containers.DynamicContainer()) == [
        f"{name}: the container has no provider of this name; start-up order hangs on it"
        for name in ("ledger", "memory_plan", "kv_pool")
    ]


def test_diagram() -> None:
    container = small()
    container.set_provider("late", providers.Singleton(Wants, part=container.kv_pool.provider))
    assert (
        diagram(container)
        == diagram(container)
        == (
            """\
flowchart TD
  subgraph host["host: holds no device memory"]
    device["device<br/>Device<br/>cfg.device"]
    late["late<br/>Wants"]
  end
  subgraph reserve["reserve: takes the ledger, leaves a receipt"]
    ledger["ledger<br/>MemoryLedger<br/>cfg.memory"]
  end
  subgraph size["size: seals the ledger, the rest becomes KV pages"]
    memory_plan["memory_plan<br/>MemoryPlan.build"]
    kv_pool["kv_pool<br/>Pool"]
  end
  subgraph run["run: allocates nothing that outlives a step"]
    pages["pages<br/>PageAllocator"]
    engine["engine<br/>Served"]
  end
  device --> ledger
  ledger --> memory_plan
  memory_plan --> kv_pool
  kv_pool --> pages
  pages --> engine
  kv_pool -.-> late"""
        )
    )


def test_the_command_prints_the_stages_of_the_real_container(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with calls_into(EngineContainer) as called:
        assert run(build(EngineConfig())) == JobResult(None, None)
    assert called == []
    printed = capsys.readouterr().out
    stages = {stage.partition("[")[0]: stage for stage in printed.split("  subgraph ")[1:]}
    members = {
        stage: re.findall(r"^    (\w+)\[", text, re.MULTILINE) for stage, text in stages.items()
    }
    assert list(members) == ["host", "reserve", "size", "run"]
    assert members["reserve"][0] == "ledger" and "lora_manager" in members["reserve"]
    assert members["size"] == ["memory_plan", "kv_pool"]
    assert members["run"][-1] == "engine"
    for name in members["reserve"][1:]:
        assert f"  {name} -- receipt --> memory_plan\n" in printed
