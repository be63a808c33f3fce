"""What a request asks of the sampler and when it wants to end; every range is checked when it is
built.

Knows nothing of tensors or text. Refusals are RequestErrors that name the field, the value and what
is allowed.
"""

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any

from engine.config import SamplingConfig
from engine.errors import RequestError

MAX_SEED = (1 << 63) - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. Raises RequestError on a value out of range or of the wrong type.

    temperature: 0 is greedy, above 0 drawn; the filters act on drawn tokens only
    top_k, top_p, min_p: 0, 1.0 and 0.0 are off; applied in this order
    max_tokens: longest answer in tokens
    seed: start of the random stream; None leaves the choice to the engine
    stop: texts that end the answer and are cut from it; stop_token_ids: ids that end it
    ignore_eos: go on after the model's own end tokens
    logprobs: None, or how many of the likeliest tokens to report beside the chosen one
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, None)
        _integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "true or false")
        _check_stops(self.stop)
        _check_stop_token_ids(self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, with no draw."""
        return self.temperature == 0

    @classmethod
    def from_config(cls, cfg: SamplingConfig, **overrides: Any) -> "SamplingParams":
        """The configured defaults with `overrides` by field name; lists become tuples, one stop
        text a tuple.

        Raises RequestError on an unknown name, naming the closest known one, and on bad values.
        """
        known = [field.name for field in fields(cls)]
        for name in overrides:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise RequestError(
                    f"{name}: unknown sampling parameter; {hint}known are {', '.join(known)}"
                )
        defaults = {field.name: getattr(cfg, field.name) for field in fields(cfg)}
        return cls(**{name: _frozen(name, value) for name, value in (defaults | overrides).items()})


def _frozen(name: str, value: Any) -> Any:
    if name == "stop" and isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _check(field: str, value: Any, ok: bool, allowed: str) -> None:
    if not ok:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        raise RequestError(f"{field}: got {shown}, allowed is {allowed}")


def _number(field: str, value: Any, low: float, high: float | None, *, above: bool = False) -> None:
    if high is None:
        allowed = f"a finite number >= {low:g}"
    elif above:
        allowed = f"a number above {low:g} and at most {high:g}"
    else:
        allowed = f"a number from {low:g} to {high:g}"
    try:
        ok = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        ok = False
    ok = ok and (value > low if above else value >= low) and (high is None or value <= high)
    _check(field, value, ok, allowed)


def _integer(field: str, value: Any, low: int, high: int | None = None) -> None:
    allowed = f"a whole number >= {low}" if high is None else f"a whole number from {low} to {high}"
    ok = isinstance(value, int) and not isinstance(value, bool)
    _check(field, value, ok and value >= low and (high is None or value <= high), allowed)


def _check_stops(stops: Any) -> None:
    _check("stop", stops, isinstance(stops, tuple), "a tuple of texts")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: got {len(stops)} texts, allowed are at most {MAX_STOPS}")
    allowed = f"a text of 1 to {MAX_STOP_CHARS} characters"
    for stop in stops:
        _check("stop", stop, isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS, allowed)


def _check_stop_token_ids(ids: Any) -> None:
    _check("stop_token_ids", ids, isinstance(ids, tuple), "a tuple of token ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids: got {len(ids)} ids, allowed are at most {MAX_STOP_TOKEN_IDS}"
        )
    for token_id in ids:
        _integer("stop_token_ids", token_id, 0)
