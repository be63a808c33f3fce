"""From sampled ids to what a caller sees: text deltas, stop strings, finish reasons, whole
completions.
"""

from dataclasses import dataclass

from engine.runtime.request import FinishReason, Request
from engine.runtime.sampler import TokenLogprobs
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop import StopStrings
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token: its id, the text that became certain with it, and how the request ended,
    if it did.
    """

    request_id: int
    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `logprobs` has one entry per token when they were asked for."""

    request_id: int
    adapter: str | None
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""


class OutputStream:
    """Detokenizes one request and cuts it at stop strings; no text without a tokenizer."""

    def __init__(self, request: Request, adapter: str | None, tokenizer: Tokenizer) -> None:
        self.request = request
        self.adapter = adapter
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer.available else None
        self._stops = StopStrings(request.params.stop)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._error = ""

    def push(
        self, token_id: int, logprobs: TokenLogprobs | None, reason: FinishReason | None
    ) -> TokenEvent:
        """Take one token; `reason` is set if the request ends with it for reasons other than its
        text.
        """
        if logprobs is not None:
            self._logprobs.append(logprobs)
        text, stopped = "", False
        if self._detokenizer is not None and reason is not FinishReason.stop:
            text, stopped = self._stops.push(self._detokenizer.push(token_id))
        if stopped:
            reason = FinishReason.stop
        elif self._detokenizer is not None and reason is not None:
            tail, stopped = self._stops.push(self._detokenizer.flush())
            text += tail + ("" if stopped else self._stops.flush())
            reason = FinishReason.stop if stopped else reason
        self._text.append(text)
        return TokenEvent(self.request.request_id, token_id, text, logprobs, reason)

    def fail(self, error: str) -> TokenEvent:
        """End with an error."""
        self._error = error
        return TokenEvent(
            self.request.request_id, None, "", finish_reason=FinishReason.error, error=error
        )

    def completion(self) -> Completion:
        """All of it; the request must have ended."""
        request = self.request
        assert request.finish_reason is not None
        return Completion(
            request.request_id,
            self.adapter,
            tuple(request.prompt_ids),
            tuple(request.output_ids),
            "".join(self._text),
            request.finish_reason,
            tuple(self._logprobs),
            self._error,
        )
