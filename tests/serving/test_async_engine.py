"""The asyncio face of the engine: streams, early leave, adapter changes while others decode."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests_support import random_adapter

from engine.errors import AdapterError, RequestError
from engine.lora.ref import LoRARef
from engine.runtime.request import FinishReason
from engine.serving.async_engine import AsyncEngine
from engine.serving.engine import Engine

CASE = Path(__file__).parent.parent / "data" / "cases" / "c00_control_all7" / "adapter"
PROMPT = [1, 267, 334, 339]
Q = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in (0, 1)}


@pytest.fixture
def engine(bases: Path, make_engine: Any) -> Engine:
    made: Engine = make_engine(bases / "llama")
    made.load_adapter_from_tensors("a", *random_adapter(Q, 4, 1))
    return made


def sampling(engine: Engine, max_tokens: int = 8) -> Any:
    return engine.sampling_params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def collect(
    served: AsyncEngine, prompt: Any, params: Any, adapter: str | None
) -> tuple[list[int], str, Any]:
    ids, text, reason = [], "", None
    async for event in served.stream(prompt, params, adapter):
        ids.append(event.token_id)
        text += event.text
        reason = event.finish_reason
    return ids, text, reason


def test_streams_equal_generate(engine: Engine) -> None:
    jobs = [([i + 1, *PROMPT], "a" if i % 2 else None) for i in range(10)]
    expected = [engine.generate([prompt], sampling(engine), name)[0] for prompt, name in jobs]

    async def run() -> list[Any]:
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(*(collect(served, p, sampling(engine), n) for p, n in jobs))

    for (ids, text, reason), completion in zip(asyncio.run(run()), expected, strict=True):
        assert (ids, text, reason) == (
            list(completion.token_ids),
            completion.text,
            FinishReason.length,
        )


def test_leaving_a_stream_frees_everything_and_unload_goes_through(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            stream = served.stream(PROMPT, sampling(engine, 200), "a")
            async for _ in stream:
                break
            await stream.aclose()
            await served.unload_adapter("a")
            assert await served.list_adapters() == ()

    asyncio.run(run())
    assert not engine.has_work
    assert engine.scheduler.prefix_cache.num_available == engine.scheduler.pages.num_pages


def test_loading_while_others_decode_changes_nobodys_tokens(engine: Engine, tmp_path: Path) -> None:
    expected = list(engine.generate([PROMPT], sampling(engine, 40), "a")[0].token_ids)

    async def run() -> list[int]:
        async with AsyncEngine(engine) as served:
            task = asyncio.create_task(collect(served, PROMPT, sampling(engine, 40), "a"))
            await asyncio.sleep(0)
            with pytest.raises(AdapterError):
                await served.load_adapter("b", tmp_path)
            ids, _, _ = await task
            return ids

    assert asyncio.run(run()) == expected


def test_others_decode_while_an_adapter_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading waits for a stream that began later to end."""
    ended = threading.Event()
    read = engine.lora_manager.read_lora_adapter

    def slowly(ref: LoRARef) -> Any:
        assert ended.wait(30), "the engine waited for the adapter"
        return read(ref)

    monkeypatch.setattr(engine.lora_manager, "read_lora_adapter", slowly)

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            load = asyncio.create_task(served.load_adapter("b", CASE))
            await asyncio.sleep(0)
            await collect(served, PROMPT, sampling(engine), "a")
            ended.set()
            assert (await load).name == "b"

    asyncio.run(run())


def test_refusals_reach_the_caller(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            with pytest.raises(RequestError, match="the prompt is empty"):
                await collect(served, [], sampling(engine), None)
            with pytest.raises(AdapterError, match="'b' is not loaded"):
                await collect(served, PROMPT, sampling(engine), "b")
            assert (await collect(served, PROMPT, sampling(engine), None))[2] is FinishReason.length

    asyncio.run(run())


def test_a_fault_of_the_engine_ends_streams_with_an_error_and_the_next_one_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("boom")

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            with monkeypatch.context() as patch:
                patch.setattr(engine.scheduler, "schedule", broken)
                two = engine.sampling_params(n=2)
                events = [event async for event in served.stream(PROMPT, two, "a")]
            assert [event.index for event in events] == [0, 1]
            for event in events:
                assert event.finish_reason is FinishReason.error and event.error == "boom"
            assert (await collect(served, PROMPT, sampling(engine), "a"))[2] is FinishReason.length

    asyncio.run(run())
    engine.scheduler.check_integrity()


def test_a_stream_carries_all_samples_and_ends_after_the_last(engine: Engine) -> None:
    drawn = engine.sampling_params(temperature=1.0, seed=4, n=3, max_tokens=30, stop_token_ids=[9])
    weights = {"a": 0.5}
    expected = engine.generate([PROMPT], drawn, weights)

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            texts = {index: "" for index in range(3)}
            async for event in served.stream(PROMPT, drawn, weights, priority=2):
                texts[event.index] += event.text
            assert texts == {own.index: own.text for own in expected}
            stream = served.stream(PROMPT, drawn, "a")
            await anext(stream)
            await stream.aclose()
            await served.unload_adapter("a")

    asyncio.run(run())
    assert not engine.has_work and not served_by(engine)


def test_structured_answers_stream_and_bad_grammars_reach_the_caller(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            with pytest.raises(RequestError, match=r"regex: .*unclosed group"):
                await collect(served, PROMPT, engine.sampling_params(regex="("), "a")
            _, text, reason = await collect(
                served, PROMPT, engine.sampling_params(regex="[ab]{4}"), "a"
            )
            assert set(text) <= set("ab") and len(text) == 4 and reason is FinishReason.stop

    asyncio.run(run())


def test_a_caller_that_gives_up_while_queueing_leaves_nothing_behind(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            for pause in (0.0, 0.0, 0.001, 0.003):
                task = asyncio.create_task(collect(served, PROMPT, sampling(engine, 100), "a"))
                await asyncio.sleep(pause)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await served.unload_adapter("a")
            assert not served._listeners

    asyncio.run(run())
    assert not engine.has_work and not served_by(engine)


def served_by(engine: Engine) -> list[str]:
    """Names of the adapters that requests still hold or may name."""
    return [loaded.ref.name for loaded in engine.lora_manager._by_id.values()]
