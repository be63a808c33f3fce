"""The EngineClient over an engine process, which it starts, drains, ends, and starts anew when it
dies.

Belongs to one event loop. Knows nothing of HTTP.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from loguru import logger

from engine.config import EngineConfig
from engine.errors import EngineDiedError, EngineError
from engine.lora.ref import FROM_TENSORS
from engine.server.client import EngineClient, EngineState
from engine.server.messages import AdapterInfo, EngineStats, Ready, TokenDelta
from engine.server.session import EngineSession, Facts

NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, [], [], 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
WHY_NOT = {
    EngineState.starting: "the engine process is starting; try again later",
    EngineState.draining: "the server is shutting down and takes no new requests",
    EngineState.dead: "the engine process is dead; the server's log says why",
}


class ProcessClient(EngineClient):
    """Call `start` first and `close` last, whatever happens in between."""

    def __init__(self, config: EngineConfig) -> None:
        self.state = EngineState.starting
        self.adapters: tuple[AdapterInfo, ...] = ()
        self.stats = NO_STATS
        self.num_restarts = 0
        self._config = config
        self._session: EngineSession | None = None
        self._leaving = False
        self._restarted_at: deque[float] = deque()
        self._restarting: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the process and wait until its engine is built. Raises EngineError with the reason
        if it cannot be.
        """
        await self._start_session(self._config)
        self.state = EngineState.ready

    async def drain(self, timeout_s: float) -> None:
        """Take no new streams and wait until the open ones have been read to their end; what is
        not after `timeout_s` is given up.
        """
        self._leave(EngineState.draining)
        session = self._session
        if session is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await session.wait_until_idle()
        except TimeoutError:
            num = session.give_up_streams("the server has shut down before the answer was whole")
            logger.warning("{} streams are given up after {:g} s", num, timeout_s)

    async def close(self) -> None:
        """End the process; what is open is given up."""
        self._leave(EngineState.dead)
        if self._restarting is not None:
            self._restarting.cancel()
        if self._session is not None:
            await self._session.close()

    def kill(self) -> None:
        """End the process at once; for whoever cannot wait."""
        self._leave(EngineState.dead)
        if self._session is not None:
            self._session.kill()

    def _leave(self, state: EngineState) -> None:
        self._leaving = True
        if self.state is not EngineState.dead:
            self.state = state

    # ------------------------------------------------------------------ what routes use

    async def stream(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        adapter: str | dict[str, float] | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[TokenDelta, None]:
        deltas = self._ready_session().stream(prompt, sampling, adapter, priority)
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, replace: bool = False
    ) -> AdapterInfo:
        return await self._ready_session().load(name, path, pinned=pinned, replace=replace)

    async def load_adapter_from_tensors(
        self, name: str, data: bytes, config: dict[str, Any], *, replace: bool = False
    ) -> AdapterInfo:
        return await self._ready_session().load_tensors(name, data, config, replace=replace)

    async def unload_adapter(self, name: str) -> None:
        await self._ready_session().unload(name)

    def _ready_session(self) -> EngineSession:
        if self.state is not EngineState.ready or self._session is None:
            raise EngineDiedError(WHY_NOT[self.state])
        return self._session

    # ------------------------------------------------------------------ start, death, restart

    async def _start_session(self, config: EngineConfig) -> None:
        limit = config.server.max_stream_events
        self._session = EngineSession(limit, self._note, self._on_end)
        await self._session.start(config)

    def _note(self, facts: Facts) -> None:
        if isinstance(facts, Ready):
            self.info = facts.info
        if facts.adapters is not None:
            self.adapters = tuple(facts.adapters)
        if facts.stats is not None:
            self.stats = facts.stats

    def _on_end(self, what: str) -> None:
        """The process is gone; one that served is replaced, unless the server is leaving."""
        wanted, was_ready = self.adapters, self.state is EngineState.ready
        if self.state in (EngineState.ready, EngineState.draining):
            logger.error(what)
        self.state = EngineState.dead
        self._forget_what_ran()
        if was_ready:
            self._restarting = asyncio.get_running_loop().create_task(self._restart(wanted))

    def _forget_what_ran(self) -> None:
        """Names of adapters stay: they will be loaded again."""
        self.stats = msgspec.structs.replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_kv_tokens_used=0,
            num_adapters_resident=0,
            running_adapters=[],
            waiting_adapters=[],
        )
        self.adapters = tuple(
            msgspec.structs.replace(own, ready=False, num_users=0) for own in self.adapters
        )

    async def _restart(self, wanted: Sequence[AdapterInfo]) -> None:
        """Start processes until one is ready, with the adapters of the one that died, or too many
        were started.
        """
        # All adapters are loaded below: one that is broken now must not keep the engine down.
        lora = replace(self._config.lora, adapters={}, pinned=[])
        config = replace(self._config, lora=lora)
        while not self._leaving and self._may_restart():
            self.num_restarts += 1
            self.state = EngineState.starting
            logger.warning("the engine process is started anew, restart {}", self.num_restarts)
            try:
                await self._start_session(config)
                await self._load_again(wanted)
            except EngineError as error:
                logger.error("the restart failed: {}", error)
                assert self._session is not None
                await self._session.close()
            else:
                self.state = EngineState.draining if self._leaving else EngineState.ready
                logger.info("the engine process is back")
                return
        self.state = EngineState.dead
        logger.error(
            "the engine process stays dead after {} restarts within {:g} s (server.max_restarts)",
            len(self._restarted_at),
            self._config.server.restart_window_s,
        )

    def _may_restart(self) -> bool:
        cfg, now = self._config.server, time.monotonic()
        while self._restarted_at and now - self._restarted_at[0] > cfg.restart_window_s:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= cfg.max_restarts:
            return False
        self._restarted_at.append(now)
        return True

    async def _load_again(self, wanted: Sequence[AdapterInfo]) -> None:
        """Raises EngineDiedError; whatever else goes wrong costs one adapter."""
        assert self._session is not None
        for own in wanted:
            if own.path == FROM_TENSORS:
                logger.error("adapter {!r} came from tensors and is lost; load it again", own.name)
                continue
            try:
                await self._session.load(own.name, own.path, pinned=own.pinned, replace=False)
            except EngineDiedError:
                raise
            except EngineError as error:
                logger.error("adapter {!r} is lost: {}", own.name, error)
