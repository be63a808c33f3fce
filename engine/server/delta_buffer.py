"""Deltas of one stream between their arrival and their reader, at most so many.

Belongs to one event loop. Knows nothing of where they come from.
"""

import asyncio
from collections import deque

from engine.server.messages import TokenDelta


class DeltaBuffer:
    """Ends with the last delta of the last of `num_samples`, or with an error."""

    def __init__(self, num_samples: int, max_deltas: int) -> None:
        self._num_open = num_samples
        self._max_deltas = max_deltas
        self._deltas: deque[TokenDelta] = deque()
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether all deltas have arrived, read or not."""
        return self._num_open <= 0

    @property
    def full(self) -> bool:
        return len(self._deltas) >= self._max_deltas

    def put(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._num_open -= delta.finish_reason is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will arrive; `error` is raised after what has."""
        self._error = error
        self._changed.set()

    def clear(self) -> None:
        """Drop what was not read."""
        self._deltas.clear()

    async def get(self) -> TokenDelta | None:
        """The next delta; None after the last one."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.complete:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._deltas.popleft()
