"""The engine behind asyncio: steps run on one thread, requests and adapter changes are handed to it
between steps.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar, cast

from engine.lora.ref import LoRARef
from engine.runtime.sampling_params import SamplingParams
from engine.serving.engine import Engine
from engine.serving.inputs import AdapterChoice, Prompt
from engine.serving.loop import EngineLoop
from engine.serving.output import TokenEvent

_Result = TypeVar("_Result")


class AsyncEngine:
    """Use as `async with AsyncEngine(engine) as served:`; the engine must not be stepped by others
    meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._listeners: dict[int, Callable[[TokenEvent], None]] = {}
        self._loop = EngineLoop(self._tell)
        self._thread = threading.Thread(
            target=self._loop.run, args=(engine,), name="engine-loop", daemon=True
        )

    async def __aenter__(self) -> "AsyncEngine":
        self._thread.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._loop.stop()
        await asyncio.to_thread(self._thread.join)

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        adapter: AdapterChoice | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[TokenEvent]:
        """Token events of all samples as they come. Leaving the loop early aborts the request.
        Raises RequestError, AdapterError.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        params = sampling if sampling is not None else self.engine.sampling_params()
        if params.structure is not None:
            # Others' steps go on meanwhile; the request finds it compiled.
            await asyncio.to_thread(self.engine.grammars.matcher, *params.structure)
        request_ids: list[int] = []

        def listen(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def add() -> None:
            request_id = self.engine.add_request(prompt, params, adapter, priority=priority)
            self._listeners[request_id] = listen
            request_ids.append(request_id)

        num_open = params.n
        try:
            await self._run(add)
            while num_open:
                event = await events.get()
                yield event
                num_open -= event.finish_reason is not None
        finally:
            # Runs after `add`, also if that was given up before it began.
            self._loop.hand_over(lambda: self._drop(request_ids))

    async def load_adapter(
        self, name: str, path: str | Path, *, pinned: bool = False, replace: bool = False
    ) -> LoRARef:
        """Load while others decode; with `replace` in the place of one that has the name. Raises
        AdapterError.
        """
        load = self.engine.load_adapter
        read = await asyncio.to_thread(self.engine.read_adapter, name, path)
        return await self._run(lambda: load(name, path, pinned=pinned, replace=replace, read=read))

    async def unload_adapter(self, name: str) -> None:
        """Unload between two steps. Raises AdapterError."""
        await self._run(lambda: self.engine.unload_adapter(name))

    async def list_adapters(self) -> tuple[LoRARef, ...]:
        return await self._run(self.engine.list_adapters)

    async def _run(self, task: Callable[[], _Result]) -> _Result:
        future: Future[object] = Future()
        self._loop.hand_over(lambda: _fulfil(future, task))
        return cast(_Result, await asyncio.wrap_future(future))

    def _drop(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
            self.engine.abort(request_id)

    def _tell(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            listener = self._listeners.get(event.request_id)
            if listener is not None:
                listener(event)


def _fulfil(future: Future[object], task: Callable[[], object]) -> None:
    """Run the task of a future that nobody gave up."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
