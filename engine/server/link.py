"""One engine process as the front end's event loop sees it: its start, the messages to and from it,
its end.

Knows nothing of requests and adapters, nor who starts it anew.
"""

import asyncio
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import cast

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.server.messages import AnyCommand, AnyReport
from engine.server.process import STOP_SIGNALS, run_engine
from engine.server.wire import FrameReader, frame

# A process that has closed its socket is as good as gone.
EXIT_TIMEOUT_S = 10.0


class EngineLink(asyncio.Protocol):
    """A running engine process."""

    def __init__(
        self,
        process: BaseProcess,
        on_report: Callable[[AnyReport], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._process = process
        self._on_report = on_report
        self._on_end = on_end
        self._frames: FrameReader[AnyReport] = FrameReader(AnyReport)
        self._transport: asyncio.WriteTransport
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_report: Callable[[AnyReport], None],
        on_end: Callable[[int], None],
    ) -> "EngineLink":
        """Spawn a process that builds the engine of `config`. `on_end` gets its exit code, once,
        after its last report. Raises EngineError if the system gives no process.
        """
        try:
            process, own = _spawn(config)
        except OSError as error:
            raise EngineError(f"the engine process cannot be started: {error}") from error
        link = cls(process, on_report, on_end)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=own)
        return link

    def send(self, command: AnyCommand) -> None:
        """Never waits; to a process that is gone it does nothing."""
        if not self._transport.is_closing():
            self._transport.write(frame(command))

    async def until_writable(self) -> None:
        """Let others run, and wait while much is under way already."""
        await asyncio.sleep(0)
        await self._writable.wait()

    def kill(self) -> None:
        self._process.kill()

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait for the process, and kill it after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
            await self._ended.wait()

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for report in self._frames.feed(data):
            self._on_report(report)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        self._reaping = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        await asyncio.to_thread(self._process.join, EXIT_TIMEOUT_S)
        if self._process.exitcode is None:
            self.kill()
            await asyncio.to_thread(self._process.join)
        exit_code = self._process.exitcode
        assert exit_code is not None
        self._ended.set()
        self._on_end(exit_code)


def _spawn(config: EngineConfig) -> tuple[BaseProcess, socket.socket]:
    """A new process and the front end's end of the socket to it."""
    own, other = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(
        target=run_engine, args=(config, other), name="engine", daemon=True
    )
    with other, _stop_signals_held_back():
        process.start()
    return process, own


@contextmanager
def _stop_signals_held_back() -> Iterator[None]:
    """A process that is started inside does not get them until it asks for them."""
    resource_tracker.ensure_running()  # it would let them through when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
