"""What callables take and make, read off their annotations. Knows nothing of providers.

An annotation that is missing, cannot be resolved or cannot be checked (TypeVar, Literal) is `Any`,
and `Any` fits everything.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cached_property
from types import FunctionType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    NewType,
    Protocol,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The name in `known` that was probably meant by `name`, or ""."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(name: str) -> str:
    """The end of a message that names what was probably meant; nothing for ""."""
    return f"; did you mean '{name}'?" if name else ""


class Call:
    """The signature of a class or function that a provider calls."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        qualified = getattr(target, "__qualname__", None)
        self.name = qualified.split("<locals>.")[-1] if qualified else repr(target)
        try:
            self.parameters: Mapping[str, inspect.Parameter] = inspect.signature(target).parameters
            self.is_readable = True
        except (TypeError, ValueError):  # built in C without a signature
            self.parameters = {}
            self.is_readable = False

    def takes(self, keyword: str) -> bool:
        """Whether `keyword` can be given, by name or through `**`."""
        variadic = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        return variadic or keyword in self.keywords

    @property
    def takes_any_position(self) -> bool:
        return any(p.kind is p.VAR_POSITIONAL for p in self.parameters.values())

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """Names that can be given as keywords."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return tuple(name for name, p in self.parameters.items() if p.kind in kinds)

    @cached_property
    def positions(self) -> tuple[str, ...]:
        """Names that can be given by position, in order."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(name for name, p in self.parameters.items() if p.kind in kinds)

    @cached_property
    def required(self) -> tuple[str, ...]:
        """Names without a default."""
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return tuple(
            name
            for name, p in self.parameters.items()
            if p.default is p.empty and p.kind not in variadic
        )

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Annotations by parameter name, and "return"."""
        return hints_of(_initializer(self.target) if _is_class(self.target) else self.target)

    @property
    def made(self) -> Any:
        """Annotation of what the call makes."""
        if _is_class(self.target):
            return self.target
        made = self.hints.get("return", Any)
        owner = getattr(self.target, "__self__", None)
        return owner if made is Self and _is_class(owner) else made


def _is_class(value: Any) -> bool:
    """Whether `value` is a class and not a mock that says so."""
    return issubclass(type(value), type)


def _initializer(target: Any) -> Any:
    return target.__new__ if target.__init__ is object.__init__ else target.__init__


def hints_of(owner: Any) -> dict[str, Any]:
    """Annotations of a class or function; strings are resolved, those that cannot be are Any."""
    try:
        return get_type_hints(owner, include_extras=True)
    except Exception:  # a name that exists for the type checker only
        function = inspect.unwrap(getattr(owner, "__func__", owner))
        scope = getattr(function, "__globals__", {})
        raw = dict(getattr(function, "__annotations__", {}))
        return {name: _resolved(hint, scope) for name, hint in raw.items()}


def _resolved(hint: Any, scope: dict[str, Any]) -> Any:
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, scope)
    except Exception:
        return Any


def classes_of(hint: Any) -> tuple[type, ...] | None:
    """The classes that `hint` allows, or None if it cannot be checked."""
    if hint is None:
        return (NoneType,)
    origin = get_origin(hint)
    if origin is Annotated:
        return classes_of(get_args(hint)[0])
    if origin in (Union, UnionType):
        members = [classes_of(member) for member in get_args(hint)]
        checkable = [member for member in members if member is not None]
        return None if len(checkable) < len(members) else sum(checkable, ())
    if isinstance(hint, NewType):
        return classes_of(hint.__supertype__)
    found = hint if origin is None else origin
    if not _is_class(found) or found in (Any, object):
        return None
    return (found,)


def fits(made: Any, wanted: Any) -> bool:
    """Whether a value annotated `made` may be given for `wanted`; a part of a union suffices.

    For a Protocol the names of its members must be there.
    """
    have, allowed = classes_of(made), classes_of(wanted)
    if have is None or allowed is None:
        return True
    if float in allowed:
        allowed = (*allowed, int)
    return any(_is_a(cls, wanted_cls) for cls in have for wanted_cls in allowed)


def _is_a(made: type, wanted: type) -> bool:
    if getattr(wanted, "_is_protocol", False):
        protocols = [cls for cls in wanted.__mro__ if cls not in (object, Generic, Protocol)]
        members = {name for cls in protocols for name in [*vars(cls), *hints_of(cls)]}
        return all(attribute_of(made, name)[0] for name in members if not name.startswith("_"))
    return issubclass(made, wanted)


def name_of(hint: Any) -> str:
    """A hint as a reader writes it."""
    if hint is None or hint is NoneType:
        return "None"
    if get_origin(hint) is None and _is_class(hint):
        return str(hint.__qualname__.split("<locals>.")[-1])
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(name_of(member) for member in get_args(hint))
    return str(hint)


def a_name_of(hint: Any) -> str:
    """A hint with its article."""
    name = name_of(hint)
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def attribute_of(owner: type, name: str) -> tuple[bool, Any]:
    """Whether instances of `owner` have attribute `name`, and its annotation.

    Of a dataclass the fields, properties and methods count; of other classes also every attribute
    that a method of theirs names, since `self.x = ...` shows nowhere else.
    """
    hints = hints_of(owner)
    if name in hints:
        return True, hints[name]
    value = inspect.getattr_static(owner, name, None)
    if isinstance(value, property):
        return True, hints_of(value.fget).get("return", Any)
    known = hasattr(owner, name) or hasattr(owner, "__getattr__") or name in _assigned(owner)
    return known, Any


def attributes_of(owner: type) -> list[str]:
    """Names of the public attributes that `attribute_of` finds."""
    names = {*hints_of(owner), *dir(owner), *_assigned(owner)}
    return sorted(name for name in names if not name.startswith("_"))


def _assigned(owner: type) -> set[str]:
    if is_dataclass(owner):
        return set()
    functions = [value for cls in owner.__mro__ for value in vars(cls).values()]
    return {
        name
        for function in functions
        if isinstance(function, FunctionType)
        for name in function.__code__.co_names
    }
