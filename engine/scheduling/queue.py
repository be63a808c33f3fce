"""The waiting line: by priority, then first come, first served; but a request that must wait for
its adapter lets others pass.

Passing is bounded: once the first in line has been passed over `max_skips` times, or for
`drain_after_s` seconds, nobody behind it is admitted until it is. A flood of more important
requests holds back the others; but once the oldest in line has seen others go ahead of it for
`drain_after_s` seconds, it counts as the most important of all until it ends. So every request is
served at last, unless `drain_after_s` is None. Knows nothing of pages or slots; the scheduler's
gate does.
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
        # The oldest in line when somebody last went ahead of it.
        self._overtaken: Request | None = None

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
        self._move_up_overtaken()
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
            self._note_overtaken(max(own.request_id for own in admitted))
        return admitted

    def _note_overtaken(self, last_admitted: int) -> None:
        oldest = min(self._requests, key=lambda own: own.request_id, default=None)
        if oldest is not None and oldest.request_id < last_admitted:
            self._note_passed(oldest)
            self._overtaken = oldest

    def _move_up_overtaken(self) -> None:
        oldest = self._overtaken
        if oldest is not None and self._is_due(oldest):
            self._overtaken = None
            if self.remove(oldest):
                oldest.overdue = True
                self.add(oldest)

    def _must_drain(self, first: Request) -> bool:
        self._note_passed(first)
        return first.num_skips >= self.max_skips or self._is_due(first)

    def _note_passed(self, request: Request) -> None:
        if request.passed_since is None:
            request.passed_since = self._clock()

    def _is_due(self, request: Request) -> bool:
        since = request.passed_since
        if since is None or self.drain_after_s is None:
            return False
        return self._clock() - since >= self.drain_after_s
