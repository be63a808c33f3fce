"""Errors that users of the engine see. Each message says what was found, what was expected, what to
change.

EngineError
 +-- ConfigError      a value in the Hydra config is wrong
 +-- WiringError      the container is wired in a way that would break start-up order
 +-- CapacityError    something does not fit into memory
 +-- ModelError       the base model's files are missing, incomplete or unsupported
 +-- AdapterError     an adapter is refused, or an operation on one is
 +-- RequestError     a request is refused
 +-- EngineDiedError  the engine process is gone, or leaving
 +-- SlowReaderError  a stream was read too slowly

`assert` is for programmer invariants only.
"""


class EngineError(Exception):
    """Root of everything that is reported to the user as one message without a traceback."""


class ConfigError(EngineError):
    """A configuration value is wrong: names the key, the value given and what is allowed."""


class WiringError(EngineError):
    """The provider graph or the order of memory reservations is wrong."""


class CapacityError(EngineError):
    """Memory does not suffice: says how many bytes were needed and how many there are."""


class ModelError(EngineError):
    """The base model cannot be loaded: lists what is missing, surplus or mis-shaped."""


class AdapterError(EngineError):
    """An adapter cannot be loaded, unloaded or used: lists all reasons at once."""


class RequestError(EngineError):
    """A request cannot be served: says what is wrong with it and how much is allowed."""


class EngineDiedError(EngineError):
    """The engine process cannot answer: it has died, is starting anew or is shutting down."""


class SlowReaderError(EngineError):
    """A stream was given up because its reader was too far behind."""


def first_few(names: list[str], num_shown: int) -> str:
    """The first names of a list and how many more there are, for a message: "a, b and 7 more"."""
    rest = f" and {len(names) - num_shown} more" if len(names) > num_shown else ""
    return ", ".join(names[:num_shown]) + rest


def shown(text: str, max_chars: int) -> str:
    """Text from a file as a part of one printable line: cut, what cannot be printed escaped."""
    cut = text if len(text) <= max_chars else f"{text[: max_chars // 2]} … {text[-60:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)
