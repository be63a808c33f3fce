"""One caller's request and its samples: what they share, and how far each has come.

Knows nothing of steps; the engine says which token a sample got and why it ends.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.runtime.logits import LogitsState
from engine.runtime.request import FinishReason, Request
from engine.runtime.sampler import SamplingRow, TokenLogprobs
from engine.serving.inputs import AdapterChoice
from engine.serving.output import Completion, PromptLogprobs, TextStream, TokenEvent


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The samples of one request, known to callers under `group_id`."""

    group_id: int
    adapter: AdapterChoice | None
    samples: list["Sample"] = field(default_factory=list)
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def open_samples(self) -> list["Sample"]:
        """Those that have not ended."""
        return [sample for sample in self.samples if sample.request.finish_reason is None]

    @property
    def prompt_logprobs(self) -> PromptLogprobs:
        """One entry for each prompt token computed so far, the first None; empty if not asked
        for.
        """
        asked = self.samples[0].request.params.prompt_logprobs is not None
        return (None, *self._prompt_logprobs) if asked else ()

    def add_prompt_logprobs(self, num_computed: int, found: Sequence[TokenLogprobs]) -> None:
        """`found` begins with prompt token `num_computed` + 1. A request that is computed anew
        brings them again: those known stay.
        """
        num_known = len(self._prompt_logprobs)
        assert num_computed <= num_known or not found, "prompt tokens were passed over"
        self._prompt_logprobs += found[num_known - num_computed :]

    def completions(self) -> list[Completion]:
        """All samples' in order; they must have ended."""
        return [sample.completion() for sample in self.samples]


class Sample:
    """One answer: its request as the scheduler sees it, its text and its log-probabilities."""

    def __init__(
        self,
        group: RequestGroup,
        request: Request,
        state: LogitsState,
        text: TextStream,
    ) -> None:
        self.group = group
        self.request = request
        self.index = len(group.samples)
        self._state = state
        self._text = text
        self._logprobs: list[TokenLogprobs] = []
        self._error = ""

    @property
    def row(self) -> SamplingRow:
        """What the sampler needs for the next token."""
        request = self.request
        state = self._state if self._state.active else None
        return SamplingRow(request.params, request.seed, request.num_tokens, state)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the token after the next depends on the next one through the model alone, and
        there will be one, unless the next one ends the sample.
        """
        params = self.request.params
        asks = self._state.active or params.logprobs is not None
        is_open = self.request.finish_reason is None
        return is_open and not asks and len(self.request.output_ids) + 1 < params.max_tokens

    @property
    def grammar_error(self) -> str:
        """Why the grammar cannot go on; empty if all is well."""
        return self._state.error

    @property
    def grammar_ended(self) -> bool:
        """Whether the answer is complete by its grammar."""
        return self._state.ended

    def push(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None,
        reason: FinishReason | None,
        *,
        silent: bool,
    ) -> TokenEvent:
        """Take the token that was just added to the request. `reason` is set if the sample ends
        with it for reasons other than its text; a `silent` token has no text.
        """
        if logprobs is not None:
            self._logprobs.append(logprobs)
        text, stopped = self._text.push(token_id, silent=silent, last=reason is not None)
        first = self.index == 0 and len(self.request.output_ids) == 1
        return TokenEvent(
            self.group.group_id,
            token_id,
            text,
            logprobs,
            FinishReason.stop if stopped else reason,
            index=self.index,
            prompt_logprobs=self.group.prompt_logprobs if first else (),
        )

    def fail(self, error: str) -> TokenEvent:
        """End with an error."""
        self._error = error
        return TokenEvent(
            self.group.group_id,
            None,
            "",
            finish_reason=FinishReason.error,
            error=error,
            index=self.index,
        )

    def completion(self) -> Completion:
        """All of it; the sample must have ended."""
        request = self.request
        assert request.finish_reason is not None
        return Completion(
            self.group.group_id,
            self.group.adapter,
            tuple(request.prompt_ids),
            tuple(request.output_ids),
            self._text.text,
            request.finish_reason,
            tuple(self._logprobs),
            self._error,
            self.index,
            self.group.prompt_logprobs,
        )


def sample_seed(seed: int, index: int) -> int:
    """Seed of a request's sample, 0 <= seed < 2^63: sample 0 has the request's own, another one the
    upper 63 bits of BLAKE2b-64 over seed and index, 8 little-endian bytes each.
    """
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
