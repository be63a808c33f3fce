"""Counts tokens and seconds of steps, apart for prompts and for decoding. Knows nothing of
requests.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Throughput:
    """A step that computes any prompt chunk counts as prefill, with all its tokens; others as
    decode.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float, *, prefill: bool) -> None:
        if prefill:
            self.prefill_tokens += num_tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += num_tokens
            self.decode_seconds += seconds

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 before the first."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Sampled tokens per second; 0 before the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
