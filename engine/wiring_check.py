"""The static check of a container: start-up order as data, read off the provider graph.

Whoever is wired to `ledger` reserves memory, so it must be a Singleton upstream of `memory_plan`;
there is no list of components to keep. All faults come in one WiringError, before anything is
built.
"""

import reprlib
from collections.abc import Iterator
from typing import Any, get_args

from dependency_injector import providers

from engine.errors import WiringError
from engine.wiring_graph import (
    CALLERS,
    LEDGER,
    ONCE,
    PLAN,
    POOL,
    RECEIPT,
    RECEIPTS,
    VIEWS,
    AnyProvider,
    Argument,
    Graph,
    arguments,
    chosen_branch,
    elements,
    is_lazy,
    lazy_target,
    live,
    static_value,
)
from engine.wiring_types import (
    Call,
    a_name_of,
    attribute_of,
    attributes_of,
    classes_of,
    did_you_mean,
    fits,
    name_of,
    nearest,
)


def check(container: Any) -> None:
    """Raise one WiringError with a line for each fault of `container`'s live provider graph."""
    faults = find_faults(Graph(container))
    if faults:
        raise WiringError("\n".join(faults))


def find_faults(graph: Graph) -> list[str]:
    """All faults: of single calls in the container's order, then cycles, then of memory."""
    found = [fault for node in graph.nodes for fault in _node_faults(graph, node)]
    found += _cycle_faults(graph)
    found += _memory_faults(graph)
    return list(dict.fromkeys(found))


# ---------------------------------------------------------------------- single providers


def _node_faults(graph: Graph, node: AnyProvider) -> Iterator[str]:
    name = graph.name(node)
    if isinstance(node, providers.Dependency):
        yield (
            f"{name}: nothing is given for this Dependency; give an instance of "
            f"{name_of(node.instance_of)} when the container is made"
        )
    elif isinstance(node, providers.Selector):
        yield from _selector_faults(name, node)
    elif isinstance(node, CALLERS):
        call = graph.call(node)
        if call is None:
            yield f"{name}: provides {node.provides!r}, which cannot be called; give a class"
        else:
            yield from _call_faults(graph, name, call, node)


def _selector_faults(name: str, selector: providers.Selector[Any]) -> Iterator[str]:
    known, value = static_value(selector.selector)
    if known and chosen_branch(selector) is None:
        branches = sorted(selector.providers)
        hint = did_you_mean(nearest(str(value), branches))
        yield f"{name}: {value!r} is none of its choices ({', '.join(branches)}){hint}"


def _call_faults(graph: Graph, name: str, call: Call, node: AnyProvider) -> Iterator[str]:
    """Compare what `node` passes with the signature and annotations of what it calls."""
    if not call.is_readable:
        return
    given: set[str] = set()
    passed = {argument.name for argument in arguments(node)}
    for argument in arguments(node):
        parameter, wanted = argument.name, Any
        if argument.kind == "position":
            index = int(argument.name)
            if index < len(call.positions):
                parameter = call.positions[index]
            elif not call.takes_any_position:
                yield f"{name}: {call.name} takes {len(call.positions)} positions, got {index + 1}"
        elif argument.kind == "keyword" and not call.takes(parameter):
            meant = _meant(call, parameter, passed)
            yield f"{name}: {call.name} has no parameter '{parameter}'{did_you_mean(meant)}"
            given.add(meant)
            continue
        if argument.kind != "attribute":
            given.add(parameter)
            wanted = call.hints.get(parameter, Any)
        yield from _value_faults(graph, f"{name}: {call.name}({parameter})", argument, wanted)
    for parameter in call.required:
        if parameter not in given:
            hint = _who_gives(graph, parameter, call.hints.get(parameter, Any))
            yield f"{name}: {call.name} needs '{parameter}', which nothing gives{hint}"


def _meant(call: Call, keyword: str, passed: set[str]) -> str:
    """The parameter that an unknown `keyword` was meant for: one that lacks, else one left out."""
    left = [parameter for parameter in call.required if parameter not in passed]
    free = [parameter for parameter in call.keywords if parameter not in passed]
    return nearest(keyword, left, cutoff=0.4) or nearest(keyword, free)


def _who_gives(graph: Graph, parameter: str, wanted: Any) -> str:
    """A hint to the provider of the parameter's name, its type or nearly its name."""
    if parameter in graph.named:
        return f"; wire {parameter}={parameter}"
    alike, fitting = nearest(parameter, graph.named), _fitting(graph, wanted)
    if not alike and len(fitting) == 1:
        return f"; wire {parameter}={fitting[0]}"
    return did_you_mean(alike)


def _fitting(graph: Graph, wanted: Any) -> list[str]:
    """Names of the providers that certainly make what is wanted."""
    if classes_of(wanted) is None:
        return []
    made = {name: graph.made(provider) for name, provider in graph.named.items()}
    return [n for n, m in made.items() if classes_of(m) is not None and fits(m, wanted)]


def _value_faults(graph: Graph, where: str, argument: Argument, wanted: Any) -> Iterator[str]:
    """Attributes that do not exist, and a value of another type than the parameter's."""
    for value in elements(argument.value):
        missing = _missing_attribute(graph, value)
        if missing:
            yield f"{where} reads {missing}"
            return
    made = graph.made(argument.value)
    if not fits(made, wanted):
        yield f"{where} takes {name_of(wanted)}, {_describe(graph, argument.value, wanted)}"
        return
    item_hint = get_args(wanted)[0] if len(get_args(wanted)) == 1 else Any
    if isinstance(argument.value, providers.List):
        for value in argument.value.args:
            if not fits(graph.made(value), item_hint):
                description = _describe(graph, value, item_hint)
                yield f"{where} takes {name_of(item_hint)} items, {description}"


def _missing_attribute(graph: Graph, value: Any) -> str | None:
    """'Owner.name, which does not exist' of the innermost wrong attribute of `x.provided.a.b`."""
    if not isinstance(value, VIEWS) or value.provides is None:
        return None
    inner = _missing_attribute(graph, live(value.provides))
    if inner or not isinstance(value, providers.AttributeGetter):
        return inner
    owners, name = classes_of(graph.made(value.provides)), str(value.name)
    if owners is None or len(owners) != 1 or attribute_of(owners[0], name)[0]:
        return None
    hint = did_you_mean(nearest(name, attributes_of(owners[0])))
    return f"{name_of(owners[0])}.{name}, which does not exist{hint}"


def _describe(graph: Graph, value: Any, wanted: Any) -> str:
    """What was given, and the provider or config section that would fit."""
    if is_lazy(value):
        target = graph.name(lazy_target(value))
        return f"{target}.provider is built later, by whoever calls it; wire {target} itself"
    made = graph.made(value)
    if not isinstance(value, providers.Provider):
        return f"got {name_of(made)} {_short(value)}"
    if isinstance(value, providers.Object) and graph.names.get(value) not in graph.named:
        return f"got {name_of(made)} {_short(value.provides)}"
    found = f"{_written(graph, value)} is {a_name_of(made)}"
    fitting = _fitting(graph, wanted)
    if isinstance(value, providers.AttributeGetter):
        owners = classes_of(graph.made(value.provides)) or ()
        fitting += [
            f"{_written(graph, value.provides)}.{name}"
            for owner in owners
            for name in attributes_of(owner)
            if classes_of(attribute_of(owner, name)[1]) is not None
            and fits(attribute_of(owner, name)[1], wanted)
        ]
    return f"{found}; did you mean {fitting[0]}?" if len(fitting) == 1 else found


def _short(value: Any) -> str:
    """The repr on one line, cut if it is long."""
    return " ".join(reprlib.repr(value).split())


def _written(graph: Graph, value: Any) -> str:
    """A value as containers.py writes it: `cfg.lora`, `model.provided.receipt`, `model`."""
    if value in graph.names:
        return graph.names[value]
    if isinstance(value, providers.AttributeGetter):
        return f"{_written(graph, value.provides)}.{value.name}"
    if isinstance(value, providers.ProvidedInstance):
        return f"{_written(graph, value.provides)}.provided"
    found = live(value)
    return graph.names.get(found) or type(found).__name__


# ---------------------------------------------------------------------- cycles


def _cycle_faults(graph: Graph) -> Iterator[str]:
    reported: set[AnyProvider] = set()
    for node in graph.nodes:
        upstream = graph.upstream(node)
        if node in upstream and node not in reported:
            reported |= {other for other in upstream if node in graph.upstream(other)}
            yield f"{graph.name(node)}: needs itself: {' -> '.join(graph.path(node, node))}"


# ---------------------------------------------------------------------- memory


def _memory_faults(graph: Graph) -> Iterator[str]:
    absent = [name for name in (LEDGER, PLAN, POOL) if name not in graph.named]
    if absent:
        for name in absent:
            yield f"{name}: the container has no provider of this name; start-up order hangs on it"
        return
    ledger, plan, pool = (graph.named[name] for name in (LEDGER, PLAN, POOL))
    for other in graph.ledgers[1:]:
        users = [graph.name(node) for node in graph.nodes if other in graph.ledgers_of(node)]
        used = f" (wired to {', '.join(users)})" if users else ""
        yield (
            f"{graph.name(other)}: is a second {name_of(graph.made(other))}{used}; {PLAN} seals "
            f"only '{LEDGER}', wire that one to all"
        )
    if not isinstance(plan, providers.Object) and ledger not in graph.ledgers_of(plan):
        yield f"{PLAN}: seals the ledger, so it must be wired to '{LEDGER}'; it is not"
    for node in graph.reservers:
        yield from _reserver_faults(graph, node, plan)
    for node, does in ((ledger, "keep books"), (plan, "seal the ledger"), (pool, "allocate")):
        if _builds_often(node) and node not in graph.reservers:
            kind = type(node).__name__
            yield (f"{graph.name(node)}: a {kind} would {does} once per user; make it a Singleton")
    if not isinstance(pool, providers.Object) and plan not in graph.upstream(pool):
        lazily = _lazy_way(graph, pool, plan)
        yield (
            f"{POOL}: is sized by {PLAN}, so it must need it; "
            f"{lazily or f'nothing leads from {POOL} to {PLAN}'}"
        )


def _builds_often(node: AnyProvider) -> bool:
    return isinstance(node, CALLERS) and not isinstance(node, ONCE)


def _reserver_faults(graph: Graph, node: AnyProvider, plan: AnyProvider) -> Iterator[str]:
    name = graph.name(node)
    if _builds_often(node):
        kind = type(node).__name__
        yield (
            f"{name}: reserves memory, but a {kind} would do so once per user; make it a Singleton"
        )
    owners = classes_of(graph.made(node)) or ()
    if isinstance(plan, providers.Object):
        return  # a plan that is given, not built, seals nothing
    is_late = plan in graph.upstream(node) and node not in graph.upstream(plan)
    if is_late:
        way = " -> ".join(graph.path(node, plan))
        yield f"{name}: reserves memory, so {PLAN} must need it; it is the other way round: {way}"
    if not all(attribute_of(owner, RECEIPT)[0] for owner in owners):
        yield (
            f"{name}: reserves memory, but {name_of(graph.made(node))} has no attribute "
            f"'{RECEIPT}'; keep there what ledger.reserve returns"
        )
    elif is_late:
        return
    elif node not in graph.upstream(plan):
        reason = _lazy_way(graph, plan, node) or f"nothing leads from {PLAN} to it"
        yield f"{name}: reserves memory, so {PLAN} must need it; {reason}"
    else:
        given = graph.receipts(plan)
        for receipt in graph.receipt_names(node, plan):
            if (node, receipt) not in given:
                yield (
                    f"{name}: reserves memory, but {PLAN} does not get its {receipt}; "
                    f"add {name}.provided.{receipt} to {RECEIPTS}"
                )


def _lazy_way(graph: Graph, start: AnyProvider, end: AnyProvider) -> str | None:
    """Where the way from `start` to `end` is broken by a `.provider`, if it is."""
    for node in [start, *(n for n in graph.nodes if n in graph.upstream(start))]:
        for argument in arguments(node):
            for value in elements(argument.value):
                if not is_lazy(value):
                    continue
                target = lazy_target(value)
                if target is end or end in graph.upstream(target):
                    owner, lazy = graph.name(node), graph.name(target)
                    return f"{owner} has only {lazy}.provider, which builds it later"
    return None
