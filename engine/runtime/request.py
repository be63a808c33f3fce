"""One request's state as the scheduler sees it: token counts, pages, adapter. No text, no
tensors.
"""

from dataclasses import dataclass, field
from enum import Enum

from engine.lora.ref import LoRAUse
from engine.memory.prefix_cache import CachedPage
from engine.runtime.sampling_params import SamplingParams


class FinishReason(Enum):
    stop = "stop"
    length = "length"
    abort = "abort"
    error = "error"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way. `num_computed` tokens have keys and values in `pages`.

    `adapters` names loads, each once; none is the base model. Requests of higher `priority` go
    first, then older ones; but an `overdue` one, which others passed since `passed_since` (seconds
    of the waiting line's clock), goes before all. The first of `pages` are those of `prefix`,
    pages of the prefix cache; `num_cached_tokens` are prompt tokens found there. `leader` is a
    request for the same prompt, which need be computed only once.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    adapters: tuple[LoRAUse, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    priority: int = 0
    use_prefix_cache: bool = True
    leader: "Request | None" = None
    prefix: list[CachedPage] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_skips: int = 0
    passed_since: float | None = None
    overdue: bool = False
    finish_reason: FinishReason | None = None

    @property
    def importance(self) -> tuple[bool, int, int]:
        """Sort key: the most important request first."""
        return not self.overdue, 0 if self.overdue else -self.priority, self.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that no forward pass has seen: the rest of the prompt, then the last sampled
        one.
        """
        return self.num_tokens - self.num_computed

    @property
    def max_total_tokens(self) -> int:
        """Tokens that need keys and values if the request runs to its limit (the last sampled one
        does not).
        """
        return len(self.prompt_ids) + self.params.max_tokens - 1

    def token_slice(self, start: int, count: int) -> list[int]:
        """Ids of tokens `start`..`start + count` over prompt and output."""
        prompt = self.prompt_ids[start : start + count]
        rest = count - len(prompt)
        if not rest:
            return prompt
        offset = start + len(prompt) - len(self.prompt_ids)
        return prompt + self.output_ids[offset : offset + rest]


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`num_new` tokens of a request in one step, from its first uncomputed one on."""

    request: Request
    num_new: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last token, so that its logits give the next
        one.
        """
        return self.num_new == self.request.num_pending
