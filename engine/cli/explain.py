"""Turns what Hydra and omegaconf raise into one line: the key, what was given, what is allowed.

Knows the dataclasses of engine.config and nothing else of the engine.
"""

import re
from dataclasses import is_dataclass
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from engine.cli.schema import config_keys
from engine.config import EngineConfig
from engine.errors import EngineError

PRESET_GROUP = "preset"  # a group of overlays, without a field of its own
_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def explain(error: BaseException) -> str | None:
    """The message for the user, or None for a defect of ours, which deserves its traceback."""
    if isinstance(error, EngineError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        return _unknown_option(error, error.missing_cfg_file, list(error.options))
    if isinstance(error, OverrideParseException):
        reason = str(error).split("\nSee ")[0].split("\n")[-1]
        return f"{error.override}: cannot be read ({reason}); give KEY=VALUE, quoted for the shell"
    cause = error.__cause__ or error.__context__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        file = re.match(r"In '([^']*)'", str(error))
        line = re.search(r"(?:config use \+|Error merging override \+?)[^=]*=(.*)", str(error))
        missing = re.match(r"Could not override '([^']*)'", str(error))
        given = line.group(1) if line else None
        message = unknown_key(missing.group(1), given) if missing else _bad_value(cause, given)
        return f"{message} (in {file.group(1)}.yaml)" if file else message
    if isinstance(error, OmegaConfBaseException):
        return _bad_value(error, None)
    ambiguous = re.match(r"Ambiguous value for argument '([^=]*)=(.*)'", str(error))
    if ambiguous:
        key, values = ambiguous.groups()
        return f"{key}: got several values {values}; add --multirun to run a job for each of them"
    return _joined(str(error)) if isinstance(error, HydraException) else None


def unknown_key(key: str, given: str | None) -> str:
    """The message for a key that does not exist, with the one that was meant or those that do."""
    names = list(config_keys())
    group, _, last = key.rpartition(".")
    meant = [name for name in names if name.rpartition(".")[2] == last]
    if not meant:
        alike = [name for name in (*names, PRESET_GROUP) if name.count(".") == key.count(".")]
        meant = get_close_matches(key, alike, n=1, cutoff=0.65)
    hint = f", did you mean {' or '.join(meant)}?" if meant else ";"
    siblings = [name for name in names if name.rpartition(".")[0] == group]
    place = f"in {group}" if siblings and group else "at the top"
    siblings = siblings or [name for name in names if "." not in name]
    allowed = ", ".join(name.rpartition(".")[2] for name in siblings)
    shown = "" if given is None else f" (given {given})"
    return f"{key}: no such key{shown}{hint} allowed {place}: {allowed}"


def _unknown_option(error: MissingConfigException, path: str, options: list[str]) -> str:
    named = re.search(r"Available options in '([^']*)'", str(error))
    group = named.group(1) if named else path.rpartition("/")[0]
    given = path.removeprefix(f"{group}/")
    close = get_close_matches(given, options, n=1)
    hint = f"; did you mean {group}={close[0]}?" if close else ""
    return f"{group}: got '{given}', allowed is {' | '.join(options)}{hint}"


def _bad_value(error: OmegaConfBaseException, given: str | None) -> str:
    key = error.full_key or ""
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return unknown_key(key, given)
    hint = _type_of(key)
    if hint is None:
        return f"{key}: {_joined(str(error).split('    full_key')[0])}".removeprefix(": ")
    shown = repr(error.value) if error.value is not None else given or "null"
    return f"{key}: got {shown}, allowed is {_allowed(hint)}"


def _type_of(key: str) -> Any:
    """The declared type at a dotted key, `[0]` and names of a mapping included, else None."""
    hint: Any = EngineConfig
    for part in re.findall(r"[^.\[\]]+", key):
        if is_dataclass(hint):
            hint = get_type_hints(hint).get(part)
        elif get_origin(hint) in (list, dict):
            hint = get_args(hint)[-1]
        else:
            return None
    return None if is_dataclass(hint) else hint


def _allowed(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        inner = [_allowed(part) for part in get_args(hint) if part is not NoneType]
        return " or ".join([*inner, "null"])
    if get_origin(hint) is list:
        return f"a list of {_PLURALS.get(get_args(hint)[0], 'values')}, as [A, B]"
    if get_origin(hint) is dict:
        return "a mapping, as {NAME: VALUE}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(hint.__members__)
    return _SCALARS.get(hint, str(hint))


def _joined(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
