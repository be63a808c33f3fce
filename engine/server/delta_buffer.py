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
    def over(self) -> bool:
        """Whether nothing more will arrive; what has may not be read yet."""
        return self._num_open <= 0 or self._error is not None

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

    def cut(self, error: Exception) -> None:
        """The same, and what was not read is dropped."""
        self._deltas.clear()
        self.fail(error)

    async def get(self) -> TokenDelta | None:
        """The next delta; None after the last one."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.over:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._deltas.popleft()
