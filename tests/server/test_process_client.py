"""The client over a real engine process: the same answers as in this process, nothing left behind
by those who leave, faults and restarts of the process told and survived.
"""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import DATA, tiny_config
from fake_client import tensors_body
from front_support import LOADED, make_model, offline_engine
from loguru import logger

from engine.config import EngineConfig, LogLevel, ServerConfig
from engine.errors import (
    AdapterError,
    EngineDiedError,
    EngineError,
    RequestError,
    SlowReaderError,
)
from engine.server.client import EngineState
from engine.server.link import EngineLink
from engine.server.messages import Abort, AnyCommand, Submit, TokenDelta
from engine.server.process_client import ProcessClient
from engine.server.wire import FrameReader, frame
from engine.serving.engine import Engine
from engine.serving.output import Completion

PROMPT = [1, 267, 334, 339]
LONG = {"max_tokens": 400, "ignore_eos": True}
CASE = DATA / "cases" / "c22_q_only_gqa"
Choice = str | dict[str, float] | None


def make_config(folder: Path, **server: Any) -> EngineConfig:
    adapters = {name: str(DATA / "cases" / case / "adapter") for name, case in LOADED.items()}
    config = tiny_config(
        make_model(folder),
        lora={"adapters": adapters, "pool_rank_rows": 128},
        log_level=LogLevel.error,
    )
    return dataclasses.replace(config, server=ServerConfig(**server))


def adapter_config() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((CASE / "adapter/adapter_config.json").read_bytes())
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with offline_engine(tmp_path_factory.mktemp("offline")) as made:
        yield made


class Served:
    """A started client and the event loop that it belongs to."""

    def __init__(self, config: EngineConfig) -> None:
        self.runner = asyncio.Runner()
        self.client = ProcessClient(config)
        self.run(self.client.start())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def close(self) -> None:
        self.run(self.client.close())
        self.runner.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(make_config(tmp_path_factory.mktemp("served")))
    yield made
    made.close()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[AnyCommand]:
    """What goes to the engine process from now on."""
    sent: list[AnyCommand] = []
    send = EngineLink.send

    def note(link: EngineLink, command: AnyCommand) -> None:
        sent.append(command)
        send(link, command)

    monkeypatch.setattr(EngineLink, "send", note)
    return sent


async def collect(
    client: ProcessClient, prompt: list[int], sampling: dict[str, Any], adapter: Choice = None
) -> list[TokenDelta]:
    return [delta async for delta in client.stream(prompt, sampling, adapter)]


async def until(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    """Let reports come in until `reached`."""
    async with asyncio.timeout(seconds):
        while not reached():
            await asyncio.sleep(0.002)


def is_idle(client: ProcessClient) -> bool:
    stats = client.stats
    busy = stats.num_running or stats.num_waiting or stats.num_kv_tokens_used
    return not busy and not any(own.num_users for own in client.adapters)


def assert_same(deltas: list[TokenDelta], completions: list[Completion]) -> None:
    """Deltas of all samples, put together, are the completions."""
    assert {delta.index for delta in deltas} == {own.index for own in completions}
    for expected in completions:
        own = [delta for delta in deltas if delta.index == expected.index]
        assert [delta.token_id for delta in own] == list(expected.token_ids)
        assert "".join(delta.text for delta in own) == expected.text
        reasons = [delta.finish_reason for delta in own]
        assert reasons == [None] * (len(own) - 1) + [expected.finish_reason.value]
        assert_near([delta.logprobs for delta in own if delta.logprobs], expected.logprobs)
        if expected.index == 0:
            assert_near(own[0].prompt_logprobs, expected.prompt_logprobs)


def assert_near(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """The same log-probabilities but for what a batch of other rows changes in float32."""
    assert [entry is None for entry in found] == [entry is None for entry in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    for own, other in pairs:
        assert [token_id for token_id, _ in own.top] == [token_id for token_id, _ in other.top]
        values = [own.logprob, *(value for _, value in own.top)]
        assert values == pytest.approx(
            [other.logprob, *(value for _, value in other.top)], abs=1e-4
        )


# ---------------------------------------------------------------------- answers

SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 12, "ignore_eos": True},
    {"max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3, "top_p": 0.9},
    {"max_tokens": 5, "logprobs": 3, "prompt_logprobs": 2},
    {"max_tokens": 20, "regex": "[ab]{6}"},
    {"max_tokens": 30, "temperature": 1.0, "seed": 3, "stop": ["e", "f"], "logit_bias": {9: 2.0}},
]
CHOICES: list[Choice] = [None, "rank1", "pattern", {"rank1": 0.5, "pattern": 0.5}]


def test_streams_equal_generate_with_mixed_adapters(served: Served, engine: Engine) -> None:
    jobs = [
        ([index + 1, *PROMPT], sampling, choice)
        for index, (sampling, choice) in enumerate((s, c) for s in SAMPLINGS for c in CHOICES)
    ]

    async def run() -> list[list[TokenDelta]]:
        return await asyncio.gather(*(collect(served.client, *job) for job in jobs))

    for (prompt, sampling, choice), deltas in zip(jobs, served.run(run()), strict=True):
        expected = engine.generate([prompt], engine.sampling_params(**sampling), choice)
        assert_same(deltas, expected)


def test_64_streams_at_once(served: Served, engine: Engine, commands: list[AnyCommand]) -> None:
    prompts = [[index % 50 + 2, *PROMPT[: index % 4 + 1]] for index in range(64)]
    choices = [CHOICES[index % len(CHOICES)] for index in range(64)]
    sampling = {"max_tokens": 16, "ignore_eos": True}

    async def run() -> list[list[TokenDelta]]:
        jobs = zip(prompts, choices, strict=True)
        return await asyncio.gather(
            *(collect(served.client, prompt, sampling, choice) for prompt, choice in jobs)
        )

    expected = engine.generate(prompts, engine.sampling_params(**sampling), choices)
    for deltas, completion in zip(served.run(run()), expected, strict=True):
        assert_same(deltas, [completion])
    served.run(until(lambda: is_idle(served.client)))
    assert [type(command) for command in commands] == [Submit] * 64, "what has ended is not aborted"


@pytest.mark.parametrize(
    ("prompt", "sampling", "adapter", "kind", "message"),
    [
        ([], {}, None, RequestError, "the prompt is empty"),
        (PROMPT, {"max_tokens": 0}, None, RequestError, "max_tokens: got 0"),
        (PROMPT, {"warmth": 1}, None, RequestError, "warmth: unknown sampling parameter"),
        (PROMPT, {"regex": "("}, None, RequestError, "regex: .*unclosed group"),
        (PROMPT, {}, "nobody", AdapterError, "'nobody' is not loaded; loaded adapters: rank1"),
        (PROMPT, {}, {"rank1": 11.0}, RequestError, "got weight 11.0"),
    ],
)
def test_refusals_reach_the_caller(
    served: Served,
    prompt: list[int],
    sampling: dict[str, Any],
    adapter: Choice,
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message) as caught:
        served.run(collect(served.client, prompt, sampling, adapter))
    assert type(caught.value) is kind
    assert is_idle(served.client)


# ---------------------------------------------------------------------- leaving


@pytest.mark.parametrize("num_read", [0, 1, 20], ids=["at once", "after a token", "later"])
@pytest.mark.parametrize("extra", [{}, {"regex": "[ab]*"}, {"n": 4}], ids=["one", "regex", "n"])
def test_leaving_early_aborts_once_and_frees_everything(
    served: Served, commands: list[AnyCommand], num_read: int, extra: dict[str, Any]
) -> None:
    client = served.client

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        stream = client.stream(PROMPT, LONG | extra, "rank1")
        if num_read == 0:  # given up while it waits for the first token
            reader = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        async with aclosing(stream):
            for _ in range(num_read):
                assert (await anext(stream)).finish_reason is None
        await until(lambda: is_idle(client))

    served.run(run())
    submit, abort = commands
    assert isinstance(submit, Submit) and isinstance(abort, Abort) and abort.target == submit.key


def test_a_slow_reader_is_given_up_and_the_others_go_on(
    served: Served, engine: Engine, commands: list[AnyCommand], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served.client

    async def run() -> list[TokenDelta]:
        monkeypatch.setattr(client._session, "_max_stream_events", 8)
        slow = client.stream(PROMPT, LONG, "rank1")
        await anext(slow)
        monkeypatch.setattr(client._session, "_max_stream_events", 1024)
        other = asyncio.create_task(collect(client, PROMPT, {"max_tokens": 30}, "pattern"))
        await until(lambda: any(isinstance(command, Abort) for command in commands))
        with pytest.raises(SlowReaderError, match="max_stream_events"):
            await anext(slow)
        deltas = await other
        await until(lambda: is_idle(client))
        return deltas

    deltas = served.run(run())
    expected = engine.generate([PROMPT], engine.sampling_params(max_tokens=30), "pattern")
    assert_same(deltas, expected)
    assert sum(isinstance(command, Abort) for command in commands) == 1


# ---------------------------------------------------------------------- adapters


def test_adapters_are_there_when_a_load_is_answered_and_gone_after_an_unload(
    served: Served, engine: Engine
) -> None:
    client, path = served.client, str(CASE / "adapter")
    data, config = (
        tensors_body(CASE),
        msgspec.json.decode((CASE / "adapter/adapter_config.json").read_bytes()),
    )
    engine.load_adapter("late", path)
    sampling = {"max_tokens": 8}
    expected = engine.generate([PROMPT], engine.sampling_params(**sampling), "late")
    engine.unload_adapter("late")

    async def run() -> None:
        before = client.adapters
        info = await client.load_adapter("late", path, pinned=True)
        assert client.adapters == (*before, info)
        assert (info.name, info.path, info.pinned, info.ready) == ("late", path, True, True)
        assert_same(await collect(client, PROMPT, sampling, "late"), expected)
        with pytest.raises(AdapterError, match="'late' is already loaded"):
            await client.load_adapter("late", path)
        again = await client.load_adapter_from_tensors("late", data, config, replace=True)
        assert again.lora_id != info.lora_id and client.adapters[-1] == again
        assert_same(await collect(client, PROMPT, sampling, "late"), expected)
        await client.unload_adapter("late")
        assert [own.name for own in client.adapters] == list(LOADED)
        with pytest.raises(AdapterError, match="'late' is not loaded"):
            await client.unload_adapter("late")

    served.run(run())


@pytest.mark.parametrize("data", [b"", b"no safetensors", b"\xff" * 64])
def test_tensors_that_are_none_are_refused(served: Served, data: bytes) -> None:
    with pytest.raises(AdapterError, match="adapter 'x': the data is no safetensors file"):
        served.run(served.client.load_adapter_from_tensors("x", data, {}))
    assert [own.name for own in served.client.adapters] == list(LOADED)


def test_loading_while_others_decode_changes_nobodys_tokens(served: Served, engine: Engine) -> None:
    async def run() -> list[TokenDelta]:
        deltas = []
        async with aclosing(served.client.stream(PROMPT, LONG, "rank1")) as stream:
            async for delta in stream:
                deltas.append(delta)
                if len(deltas) == 10:
                    await served.client.load_adapter("late", str(CASE / "adapter"))
        await served.client.unload_adapter("late")
        return deltas

    deltas = served.run(run())
    assert_same(deltas, engine.generate([PROMPT], engine.sampling_params(**LONG), "rank1"))


def test_counts_are_of_what_was_done(served: Served) -> None:
    client = served.client

    async def run() -> None:
        before = client.stats
        prompt = [30 + index for index in range(40)]
        for _ in range(2):
            await collect(client, prompt, {"max_tokens": 8, "ignore_eos": True}, "rank1")
        await until(lambda: is_idle(client))
        after = client.stats
        assert after.prompt_tokens_total - before.prompt_tokens_total == 80
        assert after.cached_prompt_tokens_total - before.cached_prompt_tokens_total == 32
        assert after.generated_tokens_total - before.generated_tokens_total == 16
        assert after.adapter_loads_total >= 2 and after.num_adapter_slots == 4
        async with aclosing(client.stream(PROMPT, LONG, "rank1")) as stream:
            await anext(stream)
            await until(lambda: client.stats.num_running == 1)
            assert client.stats.running_adapters == ["rank1"]
            assert [own.num_users for own in client.adapters] == [1, 0]

    served.run(run())


# ---------------------------------------------------------------------- life of the process


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


# ---------------------------------------------------------------------- frames


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_frames_arrive_whole_in_whatever_pieces(piece: int) -> None:
    sent = [Submit(key, list(range(key)), {"n": 2}, "a") for key in range(5)]
    data = b"".join(frame(command) for command in sent)
    reader: FrameReader[AnyCommand] = FrameReader(AnyCommand)
    found: list[AnyCommand] = []
    for start in range(0, len(data), piece):
        found += reader.feed(data[start : start + piece])
    assert found == sent and not reader._data
