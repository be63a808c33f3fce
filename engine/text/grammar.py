"""Structured output: JSON schemas, regular expressions and Lark grammars as bit masks over tokens.

Owns all that is llguidance's. Knows nothing of requests; who applies a mask, and to what, it is
not told. A grammar is compiled once and its matcher copied for each answer.
"""

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from engine.errors import RequestError
from engine.kernels.logit_changes import num_mask_words
from engine.text.tokenizer import Tokenizer

NUM_KEPT = 64
MAX_MESSAGE_CHARS = 400
# llguidance follows chains of rules and references by recursion, some 4 KiB for each; the longest
# text that a request may give can spell some 10 thousand of them.
STACK_BYTES = 256 << 20

_Result = TypeVar("_Result")


class GrammarMatcher:
    """How far one answer has come in its grammar."""

    def __init__(self, own: LLMatcher, num_words: int) -> None:
        self._own = own
        self._num_words = num_words

    def allowed(self, held_back: frozenset[int] = frozenset()) -> torch.Tensor:
        """Mask of the tokens that may come next: int32 [num_words], token t at bit t % 32 of word
        t // 32. Those of `held_back`, within the mask, are left out if that leaves any other.
        """
        bits = np.zeros(self._num_words, dtype=np.uint32)
        self._own.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        others = bits.copy()
        for token_id in held_back:
            others[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
        return torch.from_numpy((others if others.any() else bits).view(np.int32))

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token."""
        self._own.consume_token(token_id)

    @property
    def ended(self) -> bool:
        """Whether it is complete and nothing but an end token may follow."""
        return self._own.is_stopped() and not self._own.is_error()

    @property
    def error(self) -> str:
        """Why it cannot go on, a limit of llguidance that was reached; empty if all is well."""
        return _message(self._own.get_error()) if self._own.is_error() else ""


class Grammars:
    """Compiles for one tokenizer and one set of end tokens; the NUM_KEPT last used are kept.

    May be asked from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int], vocab_size: int) -> None:
        """`vocab_size`: width of the logits; tokenizers may know more ids or fewer."""
        self._tokenizer = tokenizer
        self._end_ids = sorted(token_id for token_id in end_ids if token_id < vocab_size)
        self._vocab_size = vocab_size
        self._own_tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=NUM_KEPT)(self._compile)

    def matcher(self, kind: str, text: str) -> GrammarMatcher:
        """A matcher at its start. `kind`: "json_schema", "regex" or "grammar" (Lark), as requests
        call them.

        JSON comes without blanks between its parts; the schemas `{}` and `true` stand for any
        object. Raises RequestError if `text` is wrong or nothing matches it.
        """
        return self._matcher(self._compiled(kind, text).deep_copy())

    def _compile(self, kind: str, text: str) -> LLMatcher:
        if not self._tokenizer.available:
            raise RequestError(f"{kind}: this model has no tokenizer.json, which grammars need")
        with self._lock:
            return _on_a_large_stack(lambda: self._compile_now(kind, text))

    def _compile_now(self, kind: str, text: str) -> LLMatcher:
        if self._own_tokenizer is None:
            self._own_tokenizer = self._make_tokenizer(kind)
        try:
            own = LLMatcher(self._own_tokenizer, _grammar(kind, text), log_level=0)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{kind}: {_message(str(error))}") from error
        if refusal := self._matcher(own).error:
            raise RequestError(f"{kind}: {refusal}")
        first = self._matcher(own.deep_copy())
        first.allowed()
        if first.error:
            raise RequestError(f"{kind}: no text matches it ({first.error})")
        return own

    def _matcher(self, own: LLMatcher) -> GrammarMatcher:
        return GrammarMatcher(own, num_mask_words(self._num_ids))

    @property
    def _num_ids(self) -> int:
        return max(self._vocab_size, self._tokenizer.id_bound)

    def _make_tokenizer(self, kind: str) -> LLTokenizer:
        if not self._end_ids:
            raise RequestError(f"{kind}: this model names no end token, which grammars need")
        try:
            return LLTokenizer(self._tokenizer.to_json(), self._num_ids, self._end_ids)
        except ValueError as error:
            raise RequestError(
                f"{kind}: this model's tokenizer cannot be used with grammars: {error}"
            ) from error


def _grammar(kind: str, text: str) -> str:
    """The text in llguidance's own form."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(text)
    schema = json.loads(text)
    if schema is True or schema == {}:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise RequestError(f"json_schema: got {text[:80]!r}, allowed is a JSON object or true")
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def _on_a_large_stack(work: Callable[[], _Result]) -> _Result:
    """Run `work` on a thread with STACK_BYTES of stack. Callers hold a lock, for the size is set
    for all threads that start meanwhile.
    """
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        future = pool.submit(work)
    finally:
        threading.stack_size(before)
    with pool:
        return future.result()


def _message(text: str) -> str:
    """llguidance's message on one line, without its parser's state."""
    line = " ".join(text.partition("<state>")[0].split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 3] + "..."
