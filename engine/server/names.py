"""From the `model` of a request to the base or adapters, and the locks that names are changed
under.

An unknown name is refused or, with `lora.resolve`, looked for in the adapter roots; it is never
the base.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from engine.errors import AdapterError, first_few
from engine.server.client import EngineClient
from engine.server.errors import ApiError, bad_request, unknown_model
from engine.server.front import FrontEnd
from engine.server.limits import check_serving
from engine.server.messages import AdapterInfo

NUM_SHOWN = 8
MAX_SHOWN_CHARS = 80

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Target:
    """Who answers. `model` is the string that the request named and the answer repeats."""

    model: str
    adapter: str | dict[str, float] | None = None

    @property
    def label(self) -> str:
        """Names for metrics; "" for the base."""
        return "+".join(self.adapter) if isinstance(self.adapter, dict) else self.adapter or ""


class Names:
    """Finds who is meant; loads and unloads happen one at a time for each name."""

    def __init__(self, client: EngineClient, front: FrontEnd) -> None:
        self._client = client
        self._front = front
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._changes: set[asyncio.Task[Any]] = set()

    def loaded(self, name: str) -> AdapterInfo | None:
        return next((info for info in self._client.adapters if info.name == name), None)

    def plain(self, model: str) -> str | None:
        """The adapter that `model` names, as NAME or BASE:NAME; None for the base."""
        base = self._front.model_name
        if model == base:
            return None
        if self.loaded(model) is None and model.startswith(f"{base}:"):
            return model.removeprefix(f"{base}:")
        return model

    async def target(self, model: str, weights: Mapping[str, float] | None) -> Target:
        """Raises ApiError 404 for names that nobody has."""
        name = self.plain(model)
        if weights is None:
            if name is not None:
                await self._ensure(name, model)
            return Target(model, name)
        if name is not None:
            raise bad_request(
                f"adapter: is given beside model {_shown(model)}, which names an adapter itself; "
                f"set model to {self._front.model_name!r}",
                param="adapter",
            )
        limit = self._client.info.max_adapter_slots
        if not 1 <= len(weights) <= max(1, limit):
            raise bad_request(
                f"adapter: got {len(weights)} names, allowed are 1 to {limit} "
                "(lora.max_loras_per_batch)",
                param="adapter",
            )
        for one in weights:
            await self._ensure(one, one)
        return Target(model, dict(weights))

    async def alone(self, name: str, change: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run `change`, no other of that name meanwhile; to its end, even if the caller leaves."""
        lock = self._locks.setdefault(name, asyncio.Lock())

        async def locked() -> _Result:
            async with lock:
                return await change()

        task = asyncio.create_task(locked())
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # seen, in case that nobody waits for it any more

    async def _ensure(self, name: str, model: str) -> None:
        """The adapter is loaded now, or ApiError."""
        if self.loaded(name) is not None:
            return
        path = None
        if self._front.resolve:
            path = await asyncio.to_thread(self._front.roots.find, name)
        if path is None:
            raise self.unknown(model)
        await self.alone(name, lambda: self._load(name, model, path))

    async def _load(self, name: str, model: str, path: Path) -> None:
        if self.loaded(name) is not None:
            return
        check_serving(self._client)
        try:
            await self._client.load_adapter(name, str(path))
        except AdapterError as error:
            raise bad_request(
                f"model {_shown(model)}: its adapter cannot be loaded: {error}", param="model"
            ) from error

    def unknown(self, model: str) -> ApiError:
        """The refusal of a name that nobody has; it lists the first few that exist."""
        names = [self._front.model_name, *(info.name for info in self._client.adapters)]
        return unknown_model(
            f"the model {_shown(model)} does not exist; there are {first_few(names, NUM_SHOWN)}"
        )


def _shown(name: str) -> str:
    return repr(name if len(name) <= MAX_SHOWN_CHARS else name[: MAX_SHOWN_CHARS - 3] + "...")
