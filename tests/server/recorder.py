"""An observer that keeps what it is told, and waiting for what another thread does."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from engine.server.observer import RequestRecord


@dataclass
class Recorder:
    content_type: ClassVar[str] = "text/plain"
    started_requests: list[RequestRecord] = field(default_factory=list)
    ends: list[tuple[str, str, int]] = field(default_factory=list)
    answers: list[tuple[str, str, int]] = field(default_factory=list)
    num_first: int = 0
    num_later: int = 0

    def started(self, request: RequestRecord) -> None:
        self.started_requests.append(request)

    def first_token(self, request: RequestRecord, seconds: float) -> None:
        self.num_first += 1
        assert seconds >= 0

    def token(self, request: RequestRecord, seconds: float) -> None:
        self.num_later += 1
        assert seconds >= 0

    def finished(self, request: RequestRecord, reason: str, seconds: float) -> None:
        self.ends.append((request.adapter, reason, request.num_generated_tokens))

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self.answers.append((method, route, status))

    def render(self) -> bytes:
        return b""


def until(reached: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for another thread. Fails when the time is up."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)
