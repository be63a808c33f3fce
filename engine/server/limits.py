"""How much is open at once, and whether the engine still gets on.

Counts samples from admission to their end, whichever way that comes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.server.client import EngineClient, EngineState
from engine.server.errors import overloaded, unavailable

WHY_NOT = {
    EngineState.starting: "the engine is starting",
    EngineState.draining: "the server is shutting down and takes no new requests",
    EngineState.dead: "the engine process has died",
}


class Admission:
    """Lets at most `max_requests` samples be open."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.num_open = 0

    @contextmanager
    def hold(self, num_samples: int) -> Iterator[None]:
        """Raises ApiError 429 if there is no room."""
        if self.num_open + num_samples > self.max_requests:
            raise overloaded(
                f"{self.num_open} requests are running or queued and {num_samples} more are too "
                f"many; at most {self.max_requests} may be (server.max_requests); try again later"
            )
        self.num_open += num_samples
        try:
            yield
        finally:
            self.num_open -= num_samples


class Watchdog:
    """Notices an engine that has work and reports no progress. Asked now and then, it costs
    nothing in between.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._seen: object = None
        self._since = clock()

    def stuck_for_s(self) -> float:
        """Seconds between the first and this call that found the same state with work in it."""
        stats, now = self._client.stats, self._clock()
        if stats is not self._seen or not (stats.num_running or stats.num_waiting):
            self._seen, self._since = stats, now
        return now - self._since


def check_serving(client: EngineClient) -> None:
    """Raise ApiError 503 unless the engine takes requests."""
    if client.state is not EngineState.ready:
        raise unavailable(f"{WHY_NOT[client.state]}; try again later")
