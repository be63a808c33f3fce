"""From a config to a checked container: replaced components, the user's own, then the static check.

Knows which providers there are only through the container. The rules are in `wiring_check`, what
they are read off in `wiring_graph`.
"""

import ast
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dependency_injector import providers

from engine.config import EngineConfig
from engine.errors import ConfigError, WiringError
from engine.wiring_check import check
from engine.wiring_diagram import diagram
from engine.wiring_graph import ENGINE, PLAN, RECEIPT, RECEIPTS, Graph, live, static_value
from engine.wiring_types import Call, attribute_of, did_you_mean, nearest

if TYPE_CHECKING:
    from engine.containers import EngineContainer

__all__ = ["Component", "build", "check", "diagram"]

TARGET = "_target_"
_T = TypeVar("_T")


class Component(providers.Singleton[_T]):
    """A Singleton whose class the config may replace: `_target_` in the section given as `cfg=`."""


def build(
    config: EngineConfig, container_class: "type[EngineContainer] | None" = None
) -> "EngineContainer":
    """The checked container of `config`; nothing in it is built yet, `container.engine()` does.

    `container_class` replaces EngineContainer by one derived from it. Raises ConfigError for a
    `_target_` or an entry of `components` that cannot be used, WiringError for faults of the graph.
    """
    container = (container_class or _container_class())(config=config)
    faults = [*_replace_components(container), *_add_components(container, config.components)]
    if faults:
        raise ConfigError("\n".join(faults))
    check(container)
    return container


def _container_class() -> "type[EngineContainer]":
    """Import the composition root; a provider used above its definition is a WiringError."""
    try:
        from engine.containers import EngineContainer
    except NameError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if Path(frame.filename).name != "containers.py":
            raise
        raise WiringError(_moved_line(str(error.name), frame)) from error
    return EngineContainer


def _moved_line(name: str, frame: traceback.FrameSummary) -> str:
    """Why `name` is unknown at the line of the composition root where `frame` stands."""
    defined: dict[str, int] = {}
    for node in ast.walk(ast.parse(Path(frame.filename).read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.setdefault(node.id, node.lineno)
        elif isinstance(node, ast.alias):
            defined.setdefault(node.asname or node.name, 0)
    where = f"containers.py:{frame.lineno}"
    if name in defined:
        return (
            f"{where}: '{name}' is used above its definition in line {defined[name]}; providers "
            "stand in start-up order, move that definition up or this one down"
        )
    return f"{where}: '{name}' is not defined{did_you_mean(nearest(name, defined))}"


# ---------------------------------------------------------------------- components of one's own


def _replace_components(container: Any) -> list[str]:
    """Let every Component provide the class that its config section names."""
    faults = []
    for provider in container.providers.values():
        if not isinstance(provider, Component):
            continue
        section = provider.kwargs.get("cfg")
        known, value = static_value(section)
        target = getattr(value, TARGET, None) if known else None
        if not isinstance(target, str) or not isinstance(section, providers.AttributeGetter):
            continue
        expected: Any = provider.provides
        found, fault = _find_class(f"{section.name}.{TARGET}", target)
        if found is not None and not issubclass(found, expected):
            fault = (
                f"{section.name}.{TARGET}: {target} is not a {expected.__name__}; derive it from "
                f"{expected.__module__}.{expected.__qualname__}"
            )
        if fault:
            faults.append(fault)
        elif found is not None:
            provider.set_provides(found)
    return faults


def _find_class(key: str, path: str) -> tuple[type | None, str]:
    """Import the class at `path` ("package.module.Class"), or say why that fails."""
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        return None, f"{key}: got {path!r}, expected package.module.Class"
    try:
        module = import_module(module_name)
    except Exception as error:  # the module is the user's own, anything may happen in it
        reason = f"{type(error).__name__}: {error}"
        return None, f"{key}: cannot import {path!r} ({reason}); give package.module.Class"
    found = getattr(module, class_name, None)
    if found is None:
        hint = did_you_mean(nearest(class_name, vars(module)))
        return None, f"{key}: module {module_name!r} has no {class_name!r}{hint}"
    if not isinstance(found, type):
        return None, f"{key}: {path!r} is a {type(found).__name__}, expected a class"
    return found, ""


def _add_components(container: Any, components: Mapping[str, Any]) -> list[str]:
    """Add a Singleton for each of the user's components, wired by the names of its parameters."""
    faults: list[str] = []
    added: dict[str, Any] = {}
    for name, entry in components.items():
        found, fault = _component_class(container, name, entry)
        if found is None:
            faults.append(fault)
        else:
            added[name] = providers.Singleton(found)
    for name, provider in added.items():
        container.set_provider(name, provider)
    for name, provider in added.items():
        values = {key: value for key, value in components[name].items() if key != TARGET}
        call = Call(provider.provides)
        if ENGINE in call.keywords and ENGINE not in values:
            faults.append(
                f"components.{name}: {call.name} takes '{ENGINE}', which is built from all "
                f"components; take parts of it ({', '.join(_parts(container))})"
            )
        wires = {
            key: container.providers[key] for key in call.keywords if key in container.providers
        }
        own = {key: providers.Object(value) for key, value in values.items()}
        provider.set_kwargs(**(wires | own))
    if added and not faults:
        _order_components(container, added)
    return faults


def _component_class(container: Any, name: str, entry: Any) -> tuple[type | None, str]:
    key = f"components.{name}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get(TARGET), str):
        return None, f"{key}: got {entry!r}, expected {{{TARGET}: package.module.Class, ...}}"
    if name in container.providers:
        provider = container.providers[name]
        section = provider.kwargs["cfg"].name if isinstance(provider, Component) else None
        advice = f"replace it by {section}.{TARGET}" if section else "choose another name"
        return None, f"{key}: the engine has a '{name}' of its own; {advice}"
    if not name.isidentifier() or hasattr(container, name):
        return None, f"{key}: {name!r} cannot be the name of a component; choose another"
    return _find_class(f"{key}.{TARGET}", entry[TARGET])


def _parts(container: Any) -> list[str]:
    engine: Any = live(container.providers[ENGINE])
    return [key for key in engine.kwargs if key in container.providers]


def _order_components(container: Any, added: Mapping[str, Any]) -> None:
    """Hand receipts of those that reserve to the plan, and all of them to the engine.

    A reserver that needs the plan itself, or keeps no receipt, gets no place: `check` refuses it.
    """
    graph = Graph(container)
    plan: Any = graph.named.get(PLAN)
    engine: Any = graph.named.get(ENGINE)
    receipts = getattr(plan, "kwargs", {}).get(RECEIPTS)
    if engine is None or not isinstance(receipts, providers.List):
        return  # not a container of the engine's kind; `check` says what it lacks
    for provider in added.values():
        leaves_receipt, _ = attribute_of(provider.provides, RECEIPT)
        is_in_time = plan not in graph.upstream(provider)
        if provider in graph.reservers and is_in_time and leaves_receipt:
            names = graph.receipt_names(provider, plan)
            receipts.add_args(*(getattr(provider.provided, name) for name in names))
    engine.add_attributes(components=providers.Dict(**added))
