"""The life of the engine process: its death is told and survived, a start that fails has its
reason, draining comes to its end.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_support import (
    CASE,
    LONG,
    PROMPT,
    Served,
    adapter_config,
    assert_same,
    collect,
    make_config,
    until,
)
from fake_client import tensors_body
from front_support import offline_engine
from loguru import logger

from engine.errors import (
    EngineDiedError,
    EngineError,
)
from engine.server.client import EngineState
from engine.server.process_client import ProcessClient
from engine.serving.engine import Engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with offline_engine(tmp_path_factory.mktemp("offline")) as made:
        yield made


def test_a_killed_engine_is_told_restarted_with_its_adapters_and_in_the_end_left_dead(
    engine: Engine, tmp_path: Path
) -> None:
    served = Served(make_config(tmp_path, max_restarts=1))
    client, lines = served.client, list[str]()
    sink = logger.add(lines.append, format="{message}")
    gone = tmp_path / "gone"
    os.symlink(CASE / "adapter", gone)

    async def die() -> None:
        stream = client.stream(PROMPT, LONG, "rank1")
        await anext(stream)
        os.kill(client.info.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match=r"exit code -9 \(SIGKILL\)"):
            async for _ in stream:
                pass
        assert client.state in (EngineState.dead, EngineState.starting)
        assert client.stats.num_running == 0 and client.stats.running_adapters == []
        with pytest.raises(EngineDiedError):
            await anext(client.stream(PROMPT, LONG))

    async def run() -> None:
        await client.unload_adapter("pattern")
        await client.load_adapter("late", str(CASE / "adapter"), pinned=True)
        await client.load_adapter_from_tensors("lost", tensors_body(CASE), adapter_config())
        await client.load_adapter("gone", str(gone))
        gone.unlink()
        pid = client.info.pid
        await die()
        await until(lambda: client.state is EngineState.ready)
        assert client.num_restarts == 1 and client.info.pid != pid
        assert [(own.name, own.pinned) for own in client.adapters] == [
            ("rank1", False),
            ("late", True),
        ]
        deltas = await collect(client, PROMPT, {"max_tokens": 8}, "rank1")
        assert_same(
            deltas, engine.generate([PROMPT], engine.sampling_params(max_tokens=8), "rank1")
        )
        await die()
        await until(lambda: any("stays dead" in line for line in lines))
        assert client.state is EngineState.dead and client.num_restarts == 1

    try:
        served.run(run())
    finally:
        served.close()
        logger.remove(sink)
    log = "".join(lines)
    assert "adapter 'lost' came from tensors and is lost" in log
    assert "adapter 'gone' is lost: " in log and "no such directory" in log


def test_a_start_that_fails_raises_its_reason(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.components = {"broken": {"_target_": "ipaddress.IPv4Address", "address": "nowhere"}}

    async def run() -> None:
        client = ProcessClient(config)
        try:
            with pytest.raises(EngineError, match="Expected 4 octets in 'nowhere'"):
                await client.start()
            assert client.state is EngineState.starting and client.num_restarts == 0
        finally:
            await client.close()

    asyncio.run(run())


def test_a_start_that_is_given_up_ends_the_process_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        client = ProcessClient(make_config(tmp_path))
        starting = asyncio.create_task(client.start())
        await until(lambda: client._session is not None and client._session._link is not None)
        starting.cancel()
        await client.close()
        assert client._session is not None and client._session._link is not None
        assert client._session._link._process.exitcode == -signal.SIGKILL

    asyncio.run(run())


def test_draining_finishes_what_is_open_refuses_what_is_new_and_ends_in_time(
    engine: Engine, tmp_path: Path
) -> None:
    served = Served(make_config(tmp_path))
    client = served.client

    async def run() -> None:
        answer = asyncio.create_task(collect(client, PROMPT, {"max_tokens": 100}, "rank1"))
        unread = client.stream(PROMPT, LONG)
        await anext(unread)
        draining = asyncio.create_task(client.drain(60.0))
        await until(lambda: client.state is EngineState.draining)
        with pytest.raises(EngineDiedError, match="takes no new requests"):
            await anext(client.stream(PROMPT, LONG))
        with pytest.raises(EngineDiedError, match="takes no new requests"):
            await client.load_adapter("late", str(CASE / "adapter"))
        deltas = await answer
        assert not draining.done(), "the other one has not been read"
        draining.cancel()
        await client.drain(0.01)
        with pytest.raises(EngineDiedError, match="has shut down before the answer was whole"):
            await anext(unread)
        assert_same(
            deltas, engine.generate([PROMPT], engine.sampling_params(max_tokens=100), "rank1")
        )
        await client.close()
        assert client.state is EngineState.dead and client.num_restarts == 0
        with pytest.raises(ProcessLookupError):
            os.kill(client.info.pid, 0)

    served.run(run())
    served.close()
