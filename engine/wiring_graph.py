"""The live provider graph of a container: who needs whom, under which names, who reserves memory.

Live: overrides and defaults of Dependencies are followed, of a Selector only the chosen branch
counts, and what is handed over unbuilt (`x.provider`) orders nothing. Nothing is built here.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, get_args

from dependency_injector import providers

from engine.wiring_types import Call, attribute_of, attributes_of, classes_of

# The only names that have a meaning to the rules; everything else is read off the graph.
LEDGER, PLAN, POOL, ENGINE = "ledger", "memory_plan", "kv_pool", "engine"
RECEIPT, RECEIPTS = "receipt", "receipts"

AnyProvider: TypeAlias = providers.Provider[Any]
GETTERS = (providers.AttributeGetter, providers.ItemGetter, providers.MethodCaller)
VIEWS = (providers.ProvidedInstance, *GETTERS)
CALLERS = (
    providers.BaseSingleton,
    providers.Factory,
    providers.Callable,
    providers.BaseResource,
)
ONCE = (providers.Singleton, providers.ThreadSafeSingleton, providers.BaseResource)


def live(provider: AnyProvider) -> AnyProvider:
    """The provider that answers when `provider` is called."""
    while True:
        if provider.last_overriding is not None:
            provider = provider.last_overriding
        elif isinstance(provider, providers.Dependency) and provider.is_defined:
            provider = provider.default
        elif isinstance(provider, providers.Selector):
            chosen = chosen_branch(provider)
            if chosen is None:
                return provider
            provider = chosen
        else:
            return provider


def is_lazy(provider: Any) -> bool:
    """Whether `provider`, as an argument, arrives unbuilt."""
    if isinstance(provider, providers.Object):
        return isinstance(provider.provides, providers.Provider)
    return isinstance(provider, providers.Delegate) or getattr(
        type(provider), "__IS_DELEGATED__", False
    )


def lazy_target(provider: Any) -> AnyProvider:
    """What a lazy argument builds when it is called."""
    wrapped = isinstance(provider, providers.Delegate | providers.Object)
    return live(provider.provides if wrapped else provider)


def chosen_branch(selector: providers.Selector[Any]) -> AnyProvider | None:
    """The branch that the config chooses, or None if there is none or the choice is not static."""
    known, value = static_value(selector.selector)
    return selector.providers.get(value) if known else None


def static_value(provider: Any) -> tuple[bool, Any]:
    """Whether `provider` only reads a given object (the config), and what it reads."""
    if not isinstance(provider, providers.Provider):
        return True, provider
    provider = live(provider)
    if isinstance(provider, providers.Object):
        return True, provider.provides
    if isinstance(provider, providers.ProvidedInstance):
        return static_value(provider.provides)
    if isinstance(provider, providers.AttributeGetter):
        known, value = static_value(provider.provides)
        if known and hasattr(value, str(provider.name)):
            return True, getattr(value, str(provider.name))
    return False, None


def base_of(provider: Any) -> Any:
    """Of `x.provided.a.b` the live x, of other values themselves, live."""
    while isinstance(provider, providers.Provider) and not is_lazy(provider):
        provider = live(provider)
        if not isinstance(provider, VIEWS):
            break
        provider = provider.provides
    return provider


def elements(value: Any) -> Iterator[Any]:
    """`value`, or the items of a List or Dict, at any depth, live unless lazy."""
    if not isinstance(value, providers.Provider) or is_lazy(value):
        yield value
        return
    found = live(value)
    if isinstance(found, providers.List):
        for item in found.args:
            yield from elements(item)
    elif isinstance(found, providers.Dict):
        for item in found.kwargs.values():
            yield from elements(item)
    else:
        yield found


@dataclass(frozen=True, slots=True)
class Argument:
    """One value that a provider passes on: by keyword, by position ("0", "1") or as attribute."""

    name: str
    value: Any
    kind: str


def arguments(provider: Any) -> list[Argument]:
    """What a Singleton, Factory, Callable or Resource passes when it builds."""
    if not isinstance(provider, CALLERS):
        return []
    found = [Argument(str(i), value, "position") for i, value in enumerate(provider.args)]
    found += [Argument(name, value, "keyword") for name, value in provider.kwargs.items()]
    attributes = getattr(provider, "attributes", {})
    return found + [Argument(name, value, "attribute") for name, value in attributes.items()]


class Graph:
    """The live providers of one container: those it names and those that stand inside others."""

    def __init__(self, container: Any) -> None:
        self.names: dict[AnyProvider, str] = {}
        self.named: dict[str, AnyProvider] = {}
        for name, provider in container.providers.items():
            self.named[name] = found = live(provider)
            self.names.setdefault(provider, name)
            self.names.setdefault(found, name)
        self._needs: dict[AnyProvider, tuple[AnyProvider, ...]] = {}
        self._upstream: dict[AnyProvider, set[AnyProvider]] = {}
        self._calls: dict[AnyProvider, Call] = {}
        self.nodes: dict[AnyProvider, str] = {}
        for name, provider in self.named.items():
            self._collect(provider, name)

    def _collect(self, provider: AnyProvider, name: str) -> None:
        """Add `provider` and what stands unnamed inside it, as `owner.keyword`."""
        if provider in self.nodes:
            return
        self.nodes[provider] = self.names.setdefault(provider, name)
        for argument in arguments(provider):
            for value in elements(argument.value):
                inner = lazy_target(value) if is_lazy(value) else base_of(value)
                if isinstance(inner, providers.Provider) and inner not in self.names:
                    self._collect(inner, f"{self.nodes[provider]}.{argument.name}")

    def name(self, provider: AnyProvider) -> str:
        return self.names.get(provider, type(provider).__name__)

    def call(self, provider: Any) -> Call | None:
        """The signature that `provider` calls, None if it calls nothing."""
        if provider not in self._calls:
            if not isinstance(provider, CALLERS) or not callable(provider.provides):
                return None
            target: Callable[..., Any] = provider.provides
            self._calls[provider] = Call(target)
        return self._calls[provider]

    # ------------------------------------------------------------------ order

    def needs(self, provider: AnyProvider) -> tuple[AnyProvider, ...]:
        """What is built right before `provider`, live, in the order of its arguments."""
        if provider not in self._needs:
            unbuilt = isinstance(provider, providers.Delegate | providers.Object)
            related = () if unbuilt else tuple(provider.related)
            self._needs[provider] = tuple(live(other) for other in related if not is_lazy(other))
        return self._needs[provider]

    def upstream(self, provider: AnyProvider) -> set[AnyProvider]:
        """All that is built before `provider`; itself only if it stands in a cycle."""
        if provider not in self._upstream:
            found: set[AnyProvider] = set()
            pending = list(self.needs(provider))
            while pending:
                other = pending.pop()
                if other not in found:
                    found.add(other)
                    pending += self.needs(other)
            self._upstream[provider] = found
        return self._upstream[provider]

    def path(self, start: AnyProvider, end: AnyProvider) -> list[str]:
        """Names on a shortest way by which `start` needs `end` (a cycle if they are the same)."""
        before: dict[AnyProvider, AnyProvider] = {}
        pending = [start]
        for provider in pending:
            for other in self.needs(provider):
                if other not in before:
                    before[other] = provider
                    pending.append(other)
        way = [end]
        while True:
            way.append(before[way[-1]])
            if way[-1] is start:
                break
        return [self.names[provider] for provider in reversed(way) if provider in self.names]

    # ------------------------------------------------------------------ memory

    @cached_property
    def ledgers(self) -> list[AnyProvider]:
        """Providers that make a ledger, the one named `ledger` first."""
        ledger = self.named.get(LEDGER)
        if ledger is None:
            return []
        kinds = classes_of(self.made(ledger)) or ()
        others = [
            node
            for node in self.nodes
            if node is not ledger
            and not isinstance(node, VIEWS)
            and any(issubclass(cls, kinds) for cls in classes_of(self.made(node)) or ())
        ]
        return [ledger, *others]

    def ledgers_of(self, provider: AnyProvider) -> list[AnyProvider]:
        """The ledgers that `provider` is wired to, itself or through one of their methods."""
        found = []
        for argument in arguments(provider):
            for value in elements(argument.value):
                base = lazy_target(value) if is_lazy(value) else base_of(value)
                is_ledger = any(base is ledger for ledger in self.ledgers)
                if is_ledger and not self._is_figure(value):
                    found.append(base)
        return found

    def _is_figure(self, value: Any) -> bool:
        """Whether `value` is a figure of the ledger (`ledger.provided.left_bytes`), no method."""
        getter = None
        while isinstance(value, VIEWS):
            getter = value if isinstance(value, GETTERS) else getter
            value = value.provides
        if not isinstance(getter, providers.AttributeGetter):
            return False
        owners = classes_of(self.made(value)) or ()
        name = str(getter.name)
        return not any(callable(inspect.getattr_static(cls, name, None)) for cls in owners)

    @cached_property
    def reservers(self) -> list[AnyProvider]:
        """Providers that are wired to a ledger, in the container's order, without the plan."""
        plan = self.named.get(PLAN)
        return [node for node in self.nodes if node is not plan and self.ledgers_of(node)]

    def receipts(self, plan: AnyProvider) -> set[tuple[AnyProvider, str]]:
        """The providers whose receipts are passed to `plan`, each with the attribute's name."""
        passed = {
            (base_of(value), str(value.name))
            for argument in arguments(plan)
            for value in elements(argument.value)
            if isinstance(value, providers.AttributeGetter)
        }
        return {(base, name) for base, name in passed if name in self.receipt_names(base, plan)}

    def receipt_names(self, node: AnyProvider, plan: AnyProvider) -> list[str]:
        """Attributes of what `node` makes that hold receipts: `receipt`, and all others that are
        annotated as what `plan` takes a list of.
        """
        call = self.call(plan)
        item = get_args(call.hints.get(RECEIPTS, Any))[:1] if call is not None else ()
        found = [
            name
            for owner in classes_of(self.made(node)) or ()
            for name in attributes_of(owner)
            if attribute_of(owner, name)[1] in item
        ]
        return list(dict.fromkeys([RECEIPT, *found]))

    # ------------------------------------------------------------------ types

    def made(self, value: Any) -> Any:
        """Annotation of what arrives where `value` is passed; Any if unknown."""
        if not isinstance(value, providers.Provider):
            return value.__class__
        if is_lazy(value):
            return providers.Provider
        found: Any = live(value)
        if isinstance(found, providers.Object):
            return found.provides.__class__
        if isinstance(found, providers.Dependency):
            return found.instance_of
        if isinstance(found, providers.List):
            return list
        if isinstance(found, providers.Dict):
            return dict
        if isinstance(found, providers.ProvidedInstance):
            return self.made(found.provides)
        if isinstance(found, providers.AttributeGetter):
            return self._attribute(found)
        call = self.call(found)
        return Any if call is None or isinstance(found, providers.BaseResource) else call.made

    def _attribute(self, getter: Any) -> Any:
        owners = classes_of(self.made(getter.provides))
        if owners is None or len(owners) != 1:
            return Any
        return attribute_of(owners[0], getter.name)[1]
