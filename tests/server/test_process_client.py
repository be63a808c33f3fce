"""The client over a real engine process: the same answers as in this process, refusals, nothing
left behind by those who leave, adapters that come and go.
"""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from client_support import (
    CASE,
    LONG,
    PROMPT,
    Choice,
    Served,
    adapter_config,
    assert_same,
    collect,
    is_idle,
    make_config,
    until,
)
from fake_client import tensors_body
from front_support import LOADED, offline_engine

from engine.errors import (
    AdapterError,
    RequestError,
    SlowReaderError,
)
from engine.server.link import EngineLink
from engine.server.messages import Abort, AnyCommand, Submit, TokenDelta
from engine.serving.engine import Engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with offline_engine(tmp_path_factory.mktemp("offline")) as made:
        yield made


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
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.session.PIECE_BYTES", 1000)
    client, path = served.client, str(CASE / "adapter")
    data, config = tensors_body(CASE), adapter_config()
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
    why = "the data is no safetensors file" if data else "no data came for it"
    with pytest.raises(AdapterError, match=f"adapter 'x': {why}"):
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
