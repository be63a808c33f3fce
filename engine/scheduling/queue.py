"""The waiting line: first come, first served, but a request that must wait for its adapter lets
others pass.

Passing is bounded: once the oldest request has been passed over `max_skips` times, nobody younger
is admitted until it is. Knows nothing of pages or slots; the scheduler's gate does.
"""

from collections.abc import Callable, Iterator

from engine.runtime.request import Request


class WaitingQueue:
    """Requests in the order of their arrival."""

    def __init__(self, max_skips: int) -> None:
        self.max_skips = max_skips
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> bool:
        """Take a request out; False if it was not waiting."""
        return self._requests.pop(request.request_id, None) is not None

    def admit(self, gate: Callable[[Request], bool]) -> list[Request]:
        """Take out, oldest first, all whom `gate` lets in. A refused request is skipped, within
        bounds.
        """
        admitted: list[Request] = []
        passed_over: list[Request] = []
        for request in self._requests.values():
            if gate(request):
                admitted.append(request)
                for older in passed_over:
                    older.num_skips += 1
            else:
                passed_over.append(request)
            if passed_over and passed_over[0].num_skips >= self.max_skips:
                break
        for request in admitted:
            del self._requests[request.request_id]
        return admitted
