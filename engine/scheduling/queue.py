"""The waiting line: by priority, then first come, first served; but a request that must wait for
its adapter lets others pass.

Passing is bounded: once the first in line has been passed over `max_skips` times, or for
`drain_after_s` seconds, nobody behind it is admitted until it is. Priorities are strict: a flood of
more important requests can hold back the others for as long as it lasts. Knows nothing of pages or
slots; the scheduler's gate does.
"""

import bisect
import time
from collections.abc import Callable, Iterator
from enum import Enum

from engine.runtime.request import Request


class Verdict(Enum):
    """What the gate says of a request: in, let others pass it (within bounds), let them pass as it
    is better off later, or nobody else for now.
    """

    admitted = "admitted"
    passed_over = "passed over"
    later = "later"
    closed = "closed"


class WaitingQueue:
    """Requests by `Request.importance`; a preempted one comes back to its old place."""

    def __init__(
        self,
        max_skips: int,
        drain_after_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_skips = max_skips
        self.drain_after_s = drain_after_s
        self._clock = clock
        self._requests: list[Request] = []
        # Who was first in line and passed over, and since when.
        self._passed_over: tuple[Request, float] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=lambda own: own.importance)

    def remove(self, request: Request) -> bool:
        """Take a request out; False if it was not waiting."""
        place = bisect.bisect_left(
            self._requests, request.importance, key=lambda own: own.importance
        )
        if place == len(self._requests) or self._requests[place] is not request:
            return False
        del self._requests[place]
        return True

    def admit(self, gate: Callable[[Request], Verdict]) -> list[Request]:
        """Take out, first in line first, all whom `gate` lets in."""
        admitted: list[Request] = []
        first: Request | None = None
        for request in self._requests:
            verdict = gate(request)
            if verdict is Verdict.closed:
                break
            if verdict is Verdict.passed_over:
                first = first or request
            elif verdict is Verdict.admitted:
                admitted.append(request)
                if first is not None:
                    first.num_skips += 1
            if first is not None and self._must_drain(first):
                break
        if admitted:
            gone = set(map(id, admitted))
            self._requests = [own for own in self._requests if id(own) not in gone]
        return admitted

    def _must_drain(self, first: Request) -> bool:
        now = self._clock()
        if self._passed_over is None or self._passed_over[0] is not first:
            self._passed_over = (first, now)
        waited = now - self._passed_over[1]
        return first.num_skips >= self.max_skips or (
            self.drain_after_s is not None and waited >= self.drain_after_s
        )
