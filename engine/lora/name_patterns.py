"""Module names as keys of rank_pattern and alpha_pattern, matched as PEFT does: a key is a regular
expression for the end of a name, `(.*\\.)?(key)$`, and the first key that matches counts.

Files may come from anywhere. A key that would take long or much memory is refused, and so is one
that `regex`, whose matching can be stopped, may read in another way than `re`, which PEFT uses.
"""

import math
import re
import time
from collections.abc import Collection, Iterable, Mapping

import regex

from engine.errors import AdapterError, shown

MATCH_SECONDS = 2.0  # for all keys with all names
MAX_KEYS = 2000
MAX_KEY_CHARS = 2000
MAX_REPEATS = 1000
MAX_SHOWN_CHARS = 120
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_REPEAT = re.compile(r"\{(\d+)?(,(\d+)?)?\}")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
# A brace that is no count begins a fuzzy match in `regex`; `[:` begins a named set.
_AMBIGUOUS = re.compile(r"\{(?!\d+(,\d*)?\}|,\d+\})|\[:")


def pattern_fault(key: str) -> str:
    """Why a key is refused; empty if it is not."""
    if _PLAIN.fullmatch(key) and len(key) <= MAX_KEY_CHARS:
        return ""
    if len(key) > MAX_KEY_CHARS:
        return f"has {len(key)} characters, at most {MAX_KEY_CHARS} are supported"
    counts = [int(high or low or 1) for low, _, high in _REPEAT.findall(key)]
    if math.prod(counts) > MAX_REPEATS:
        return f"repeats a part more than {MAX_REPEATS} times; write it plainly"
    if _AMBIGUOUS.search(_ESCAPE.sub("", key)):
        return "is ambiguous: it uses { or [: beside counts and plain sets; escape them"
    try:
        re.compile(_anchored(key))  # as PEFT does
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression ({error})"
    return ""


class NamePatterns:
    """Numbers by key. Keys of plain characters, one per module in files with many of them, are
    looked up; the others are matched one by one within MATCH_SECONDS altogether.
    """

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self._keys = list(numbers)
        self._numbers = list(numbers.values())
        # A dot of a key matches any character: plain keys by length and places of their dots.
        self._plain: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}
        self._expressions: dict[int, str] = {}
        for index, key in enumerate(self._keys):
            if _PLAIN.fullmatch(key):
                dots = tuple(place for place, char in enumerate(key) if char == ".")
                self._plain.setdefault((len(key), dots), {})[key] = index
            else:
                self._expressions[index] = key
        self._compiled: dict[int, regex.Pattern[str]] = {}
        self._matching: dict[str, list[int]] = {}
        self._seconds_left = MATCH_SECONDS

    def number(self, names: Iterable[str], default: float) -> float:
        """What the first key gives that matches one of a module's names. Raises AdapterError."""
        found = [index for name in names for index in self._matching_keys(name)]
        return self._numbers[min(found)] if found else default

    def unmatched(self, modules: Collection[Iterable[str]]) -> list[str]:
        """Keys that match none of the modules, each given by its names. Raises AdapterError."""
        found = {i for names in modules for name in names for i in self._matching_keys(name)}
        return [key for index, key in enumerate(self._keys) if index not in found]

    def _matching_keys(self, name: str) -> list[int]:
        if name not in self._matching:
            self._matching[name] = [*self._find_plain(name), *self._find_expressions(name)]
        return self._matching[name]

    def _find_plain(self, name: str) -> Iterable[int]:
        for (length, dots), keys in self._plain.items():
            start = len(name) - length
            if start < 0 or (start and name[start - 1] != "."):
                continue
            chars = list(name[start:])
            for place in dots:
                chars[place] = "."
            if (index := keys.get("".join(chars))) is not None:
                yield index

    def _find_expressions(self, name: str) -> Iterable[int]:
        for index, key in self._expressions.items():
            start = time.monotonic()
            try:
                if self._seconds_left <= 0:
                    raise TimeoutError
                if index not in self._compiled:
                    self._compiled[index] = regex.compile(_anchored(key))
                if self._compiled[index].match(name, timeout=self._seconds_left):
                    yield index
            except (TimeoutError, RecursionError, regex.error) as error:
                raise AdapterError(
                    f"pattern keys take over {MATCH_SECONDS} s to match, the last one was "
                    f"{shown(repr(key), MAX_SHOWN_CHARS)}; write it plainly"
                ) from error
            self._seconds_left -= time.monotonic() - start


def _anchored(key: str) -> str:
    return rf"(.*\.)?({key})$"
