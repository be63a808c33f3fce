"""The streams and calls of one engine process, from its start to its end.

Belongs to one event loop. Knows nothing of restarts: with the process it is over.
"""

import asyncio
import itertools
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from engine.config import EngineConfig
from engine.errors import (
    AdapterError,
    CapacityError,
    EngineDiedError,
    EngineError,
    RequestError,
    SlowReaderError,
)
from engine.server.delta_buffer import DeltaBuffer
from engine.server.link import EngineLink
from engine.server.messages import (
    Abort,
    AdapterData,
    AdapterInfo,
    AnyCommand,
    AnyReport,
    Failed,
    LoadAdapter,
    LoadAdapterTensors,
    Ready,
    Reply,
    Shutdown,
    StepReport,
    Submit,
    TokenDelta,
    UnloadAdapter,
)

# How long a step may take that was begun before the process was told to leave.
CLOSE_TIMEOUT_S = 10.0
PIECE_BYTES = 1 << 18
KINDS = {kind.__name__: kind for kind in (AdapterError, CapacityError, RequestError)}

Facts = Ready | StepReport


class EngineSession:
    """Call `start` first and `close` last, whatever happens in between."""

    def __init__(
        self,
        max_stream_events: int,
        on_facts: Callable[[Facts], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`on_facts`: what reports say of adapters and counts, before any caller hears of the same
        report. `on_end`: how the process ended, in words, after all callers have been told.
        """
        self._max_stream_events = max_stream_events
        self._on_facts = on_facts
        self._on_end = on_end
        self._link: EngineLink | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keys = itertools.count()
        # Those that have a reader; a key is its Submit's.
        self._streams: dict[int, DeltaBuffer] = {}
        self._calls: dict[int, asyncio.Future[AdapterInfo | None]] = {}
        self._changed = asyncio.Event()
        self._ended = ""

    # ------------------------------------------------------------------ life

    async def start(self, config: EngineConfig) -> None:
        """Start the process and wait until its engine is built. Raises EngineError."""
        self._link = await EngineLink.start(config, self._take, self._end)
        await self._ready

    async def wait_until_idle(self) -> None:
        """Until all streams have been read to their end and all calls are answered."""
        while self._streams or self._calls:
            self._changed.clear()
            await self._changed.wait()

    def give_up_streams(self, why: str) -> int:
        """End all that are not read to their end, their readers get EngineDiedError; how many."""
        for key, buffer in self._streams.items():
            self._give_up(key, buffer, EngineDiedError(why))
        return len(self._streams)

    async def close(self) -> None:
        """End the process; one that is still being built is not waited for."""
        if self._link is not None:
            self._link.send(Shutdown(next(self._keys)))
            is_up = self._ready.done() and not self._ready.cancelled()
            await self._link.wait_for_end(CLOSE_TIMEOUT_S if is_up else 0.0)

    def kill(self) -> None:
        if self._link is not None:
            self._link.kill()

    # ------------------------------------------------------------------ streams and calls

    async def stream(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        adapter: str | dict[str, float] | None,
        priority: int,
    ) -> AsyncGenerator[TokenDelta, None]:
        """As `EngineClient.stream`."""
        key = next(self._keys)
        buffer = DeltaBuffer(sampling.get("n", 1), self._max_stream_events)
        self._send(Submit(key, prompt, sampling, adapter, priority))
        self._streams[key] = buffer
        try:
            while (delta := await buffer.get()) is not None:
                yield delta
        finally:
            del self._streams[key]
            self._abort(key, buffer)
            self._changed.set()

    async def load(self, name: str, path: str, *, pinned: bool, replace: bool) -> AdapterInfo:
        return _loaded(await self._call(LoadAdapter(next(self._keys), name, path, pinned, replace)))

    async def load_tensors(
        self, name: str, data: bytes, config: dict[str, Any], *, replace: bool
    ) -> AdapterInfo:
        """`data` goes in pieces, so that other commands are not kept waiting."""
        key = next(self._keys)
        try:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                await self._send_when_writable(AdapterData(next(self._keys), key, piece))
            return _loaded(await self._call(LoadAdapterTensors(key, name, config, replace)))
        except asyncio.CancelledError:
            with suppress(EngineDiedError):
                self._send(Abort(next(self._keys), key))
            raise

    async def unload(self, name: str) -> None:
        await self._call(UnloadAdapter(next(self._keys), name))

    async def _call(self, command: AnyCommand) -> AdapterInfo | None:
        """Send a command and wait for its answer. Raises what the engine raised."""
        self._send(command)
        future: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        self._calls[command.key] = future
        return await future

    def _send(self, command: AnyCommand) -> None:
        """Raises EngineDiedError once the process is gone: nobody would answer."""
        if self._ended or self._link is None:
            raise EngineDiedError(self._ended or "the engine process is starting")
        self._link.send(command)

    async def _send_when_writable(self, command: AnyCommand) -> None:
        self._send(command)
        assert self._link is not None
        await self._link.until_writable()

    def _abort(self, key: int, buffer: DeltaBuffer) -> None:
        """Tell the engine that nobody waits for a stream any more, unless it is over anyway."""
        if not buffer.over:
            self._send(Abort(next(self._keys), key))

    def _give_up(self, key: int, buffer: DeltaBuffer, error: EngineError) -> None:
        self._abort(key, buffer)
        buffer.cut(error)

    # ------------------------------------------------------------------ reports

    def _take(self, report: AnyReport) -> None:
        if isinstance(report, Failed):
            self._started(EngineError(report.message))
            return
        self._on_facts(report)
        if isinstance(report, Ready):
            self._started(None)
            return
        for reply in report.replies:
            self._take_reply(reply)
        for delta in report.deltas:
            self._take_delta(delta)

    def _started(self, error: EngineError | None) -> None:
        if self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _take_reply(self, reply: Reply) -> None:
        """An answer to a call, or a stream's refusal."""
        error = KINDS.get(reply.kind, EngineError)(reply.error) if reply.kind else None
        future, buffer = self._calls.pop(reply.key, None), self._streams.get(reply.key)
        if future is not None:
            _answer(future, reply.adapter, error)
        elif buffer is not None and error is not None:
            buffer.fail(error)
        self._changed.set()

    def _take_delta(self, delta: TokenDelta) -> None:
        buffer = self._streams.get(delta.key)
        if buffer is None or buffer.over:
            return
        if buffer.full:
            self._give_up(delta.key, buffer, self._too_slow())
        else:
            buffer.put(delta)

    def _too_slow(self) -> SlowReaderError:
        return SlowReaderError(
            f"the stream was given up: {self._max_stream_events} tokens waited to be read "
            "(server.max_stream_events); read faster, or ask for fewer tokens"
        )

    def _end(self, exit_code: int) -> None:
        self._ended = what = f"the engine process has ended with {_exit_text(exit_code)}"
        self._started(EngineDiedError(f"{what} while it was starting"))
        for buffer in self._streams.values():
            if not buffer.over:
                buffer.fail(EngineDiedError(f"{what}; send the request again"))
        for future in self._calls.values():
            _answer(future, None, EngineDiedError(f"{what} before it answered"))
        self._calls.clear()
        self._changed.set()
        self._on_end(what)


def _loaded(info: AdapterInfo | None) -> AdapterInfo:
    assert info is not None, "a load is answered with its adapter"
    return info


def _answer(
    future: asyncio.Future[AdapterInfo | None],
    info: AdapterInfo | None,
    error: EngineError | None,
) -> None:
    if future.done():  # its caller has left
        return
    if error is None:
        future.set_result(info)
    else:
        future.set_exception(error)


def _exit_text(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"exit code {exit_code} ({signal.Signals(-exit_code).name})"
