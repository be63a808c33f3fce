"""What a command hands back to the job that ran it, for the table of a sweep."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobResult:
    """Tokens generated per second and tokens that the KV pool holds; None where there is none."""

    tokens_per_second: float | None
    kv_tokens: int | None
