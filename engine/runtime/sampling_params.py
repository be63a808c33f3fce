"""What a request asks of the sampler and when it wants to end; every range is checked when it is
built.

Knows nothing of tensors, text or vocabularies. Refusals are RequestErrors that name the field, the
value and what is allowed.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.config import SamplingConfig
from engine.errors import RequestError

MAX_SEED = (1 << 63) - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 128
MAX_SAMPLES = 128
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
# What the whole answer may have to match, and how many characters its text may have.
GRAMMARS = {"json_schema": 1 << 17, "regex": 1 << 16, "grammar": 1 << 16}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. Raises RequestError on a value out of range or of the wrong type.

    temperature: 0 is greedy, above 0 drawn; the filters act on drawn tokens only
    top_k, top_p, min_p: 0, 1.0 and 0.0 are off; applied in this order
    repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and
        answer; 1.0 is off
    presence_penalty, frequency_penalty: taken off the logits of the answer's tokens, once and per
        occurrence
    logit_bias: (token id, what is added to its logit), each id once
    bad_words: texts that the answer must not spell, see `Tokenizer.spellings`
    min_tokens, max_tokens: shortest and longest answer in tokens; before min_tokens nothing but the
        end of a grammar ends it
    seed: start of the random stream; None leaves the choice to the engine
    n: number of answers, sample 0 of which is what n = 1 gives
    stop: texts that end the answer and are cut from it, unless include_stop_str_in_output;
        stop_token_ids: ids that end it
    ignore_eos: go on after the model's own end tokens, or as long as the grammar allows
    logprobs, prompt_logprobs: None, or how many of the likeliest tokens to report beside the
        chosen one
    json_schema, regex, grammar: the text of a JSON schema, a regular expression, or a grammar in
        llguidance's Lark dialect that the whole answer must match; at most one of them
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 64
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, None)
        _integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, None, above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        _check_logit_bias(self.logit_bias)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("n", self.n, 1, MAX_SAMPLES)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, bool), "true or false")
        _check_texts("stop", self.stop, MAX_STOPS)
        _check_stop_token_ids(self.stop_token_ids)
        self._check_grammars()

    def _check_grammars(self) -> None:
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(
                f"{' and '.join(given)} are given together; an answer can match only one of "
                f"{', '.join(GRAMMARS)}"
            )
        for name in given:
            value, limit = getattr(self, name), GRAMMARS[name]
            ok = isinstance(value, str) and 0 < len(value) <= limit
            _check(name, value, ok, f"a text of 1 to {limit} characters")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, with no draw."""
        return self.temperature == 0

    @property
    def structure(self) -> tuple[str, str] | None:
        """The field that says what the whole answer must match, and its text."""
        given = ((name, getattr(self, name)) for name in GRAMMARS)
        return next(((name, text) for name, text in given if text is not None), None)

    @classmethod
    def from_config(cls, cfg: SamplingConfig, **overrides: Any) -> "SamplingParams":
        """The configured defaults with `overrides` by field name. Lists become tuples, one text a
        tuple of it, a mapping `logit_bias` pairs, a mapping or boolean `json_schema` its text.

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
    if name in ("stop", "bad_words") and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple(value.items())
    if name == "json_schema" and isinstance(value, Mapping | bool):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"json_schema: cannot be written as JSON: {error}") from error
    return tuple(value) if isinstance(value, list) else value


def _check(field: str, value: Any, ok: bool, allowed: str) -> None:
    if not ok:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        raise RequestError(f"{field}: got {shown}, allowed is {allowed}")


def _number(field: str, value: Any, low: float, high: float | None, *, above: bool = False) -> None:
    if high is None:
        allowed = f"a finite number {'above' if above else '>='} {low:g}"
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


def _check_texts(field: str, texts: Any, max_count: int) -> None:
    _check(field, texts, isinstance(texts, tuple), "a tuple of texts")
    if len(texts) > max_count:
        raise RequestError(f"{field}: got {len(texts)} texts, allowed are at most {max_count}")
    allowed = f"a text of 1 to {MAX_STOP_CHARS} characters"
    for text in texts:
        _check(field, text, isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS, allowed)


def _check_logit_bias(pairs: Any) -> None:
    allowed = "a mapping of token ids to numbers"
    _check("logit_bias", pairs, isinstance(pairs, tuple), allowed)
    for pair in pairs:
        _check("logit_bias", pair, isinstance(pair, tuple) and len(pair) == 2, allowed)
        token_id, value = pair
        _integer("logit_bias", token_id, 0)
        _number(f"logit_bias of token {token_id}", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise RequestError("logit_bias: a token id is given twice; give each once")


def _check_stop_token_ids(ids: Any) -> None:
    _check("stop_token_ids", ids, isinstance(ids, tuple), "a tuple of token ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids: got {len(ids)} ids, allowed are at most {MAX_STOP_TOKEN_IDS}"
        )
    for token_id in ids:
        _integer("stop_token_ids", token_id, 0)
