"""Started clients with their event loop, and what tests do with their streams."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import DATA, tiny_config
from front_support import LOADED, make_model

from engine.config import EngineConfig, LogLevel, ServerConfig
from engine.server.messages import TokenDelta
from engine.server.process_client import ProcessClient
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
