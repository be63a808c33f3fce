"""What routes tell of each request to whoever counts or traces it.

Owns the record of a request's life and the protocol of observers; knows nothing of Prometheus,
spans or HTTP.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One generation request. `model` is the base's served name, `adapter` the adapter's, names
    with weights joined by "+", "" for the base. Counts are over all its samples; times are of
    `time.perf_counter`.
    """

    request_id: str
    route: str
    model: str
    adapter: str
    num_prompt_tokens: int
    num_samples: int
    started_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    num_generated_tokens: int = 0


class Observer(Protocol):
    """All methods return at once and never raise."""

    content_type: str

    def started(self, request: RequestRecord) -> None:
        """It is admitted and goes to the engine."""

    def first_token(self, request: RequestRecord, seconds: float) -> None:
        """The first token of any of its samples is here, `seconds` after the start."""

    def token(self, request: RequestRecord, seconds: float) -> None:
        """A later token of a sample, `seconds` after that sample's last one."""

    def finished(self, request: RequestRecord, reason: str, seconds: float) -> None:
        """Once for each started one. `reason`: "stop" or "length" of its last sample, "abort" if
        the caller left, was too slow or the time was up, "error" for faults.
        """

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Any HTTP request has been answered; `route` is the template, "" if none matched."""

    def render(self) -> bytes:
        """The body of `/metrics`, of type `content_type`."""
