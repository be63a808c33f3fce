"""The front end's handle on the engine process."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

from engine.server.messages import AdapterInfo, EngineInfo, EngineStats, TokenDelta


class EngineState(Enum):
    starting = "starting"
    ready = "ready"
    draining = "draining"
    dead = "dead"


class EngineClient(ABC):
    """Everything that HTTP routes know of the engine. Belongs to one event loop."""

    state: EngineState
    info: EngineInfo
    adapters: tuple[AdapterInfo, ...]
    stats: EngineStats
    num_restarts: int

    @abstractmethod
    def stream(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        adapter: str | dict[str, float] | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[TokenDelta]:
        """Deltas of all samples as they come; the last of each has a finish reason. Leaving early
        aborts the request.

        Raises RequestError, AdapterError from the first `anext` on; EngineDiedError when the
        process dies meanwhile, SlowReaderError when the caller is too far behind.
        """

    @abstractmethod
    async def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, replace: bool = False
    ) -> AdapterInfo:
        """Raises AdapterError."""

    @abstractmethod
    async def load_adapter_from_tensors(
        self, name: str, data: bytes, config: dict[str, Any], *, replace: bool = False
    ) -> AdapterInfo:
        """`data`: a safetensors file. Raises AdapterError."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Raises AdapterError."""
