"""From sampled ids to what a caller sees: text deltas, stop strings, finish reasons, whole
completions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.runtime.request import FinishReason, Request
from engine.runtime.sampler import TokenLogprobs
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop import StopStrings
from engine.text.tokenizer import Tokenizer

PromptLogprobs = tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token: its id, the text that became certain with it, and how its sample ended,
    if it did. `index` tells a request's samples apart.

    `prompt_logprobs`, if asked for, come with the first token of sample 0.
    """

    request_id: int
    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    index: int = 0
    prompt_logprobs: PromptLogprobs = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sample. `logprobs` has one entry per token and `prompt_logprobs` one per prompt
    token, of which the first is None, when they were asked for.
    """

    request_id: int
    adapter: str | Mapping[str, float] | None
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    index: int = 0
    prompt_logprobs: PromptLogprobs = ()


class TextStream:
    """Detokenizes one sample and cuts it at stop strings; no text without a tokenizer."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self._request = request
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer.available else None
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._text: list[str] = []

    def push(self, token_id: int, *, silent: bool, last: bool) -> tuple[str, bool]:
        """Take one token; text that is now certain, and whether a stop string was found in it.

        `silent`: an end token, which has no text. `last`: the sample ends with this token anyway.
        """
        if self._detokenizer is None:
            return "", False
        may_stop = len(self._request.output_ids) >= self._request.params.min_tokens
        piece = "" if silent else self._detokenizer.push(token_id)
        text, stopped = self._stops.push(piece, may_stop=may_stop)
        if last and not stopped:
            tail, stopped = self._stops.push(self._detokenizer.flush(), may_stop=may_stop)
            text += tail + ("" if stopped else self._stops.flush())
        self._text.append(text)
        return text, stopped

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._text)
