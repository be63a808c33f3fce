"""Prefix cache and preemption change no token, and no adapter sees another's pages."""

from pathlib import Path
from typing import Any

import pytest
from tests_support import random_adapter

from engine.serving.engine import Engine

LLAMA = {"model.layers.0.self_attn.v_proj": (64, 32), "model.layers.1.mlp.down_proj": (128, 64)}
SHARED = [1, *range(40, 97)]


def load(engine: Engine, name: str, seed: int) -> None:
    engine.load_adapter_from_tensors(name, *random_adapter(LLAMA, 8, seed))


def answers(engine: Engine, prompts: list[list[int]], adapters: list[Any]) -> list[tuple[int, ...]]:
    sampling = engine.sampling_params(max_tokens=12, ignore_eos=True)
    return [c.token_ids for c in engine.generate(prompts, sampling, adapters)]


def num_hits(engine: Engine) -> int:
    return engine.scheduler.prefix_cache.stats().num_hit_tokens


@pytest.fixture
def engines(bases: Path, make_engine: Any) -> list[Engine]:
    """With the cache and without."""
    return [
        make_engine(bases / "llama", memory={"page_size": 4, "prefix_cache": cached})
        for cached in (True, False)
    ]


def test_cached_prefixes_give_the_same_tokens(engines: list[Engine]) -> None:
    prompts = [[*SHARED[:length], 300 + length] for length in (57, 20, 57, 41, 8)]
    adapters = ["a", None, "b", "a", {"a": 0.5}]
    found = []
    for engine in engines:
        load(engine, "a", 1)
        load(engine, "b", 2)
        found.append([answers(engine, prompts, adapters) for _ in range(2)])
    cached, plain = found
    assert cached[0] == cached[1] == plain[0] == plain[1]
    assert num_hits(engines[0]) > 150 and num_hits(engines[1]) == 0
    engines[0].scheduler.check_integrity()


def test_nobody_hits_what_another_adapter_computed(engines: list[Engine]) -> None:
    """Base, two adapters, one of them at another weight, and a reload under a known name."""
    cached, plain = engines
    for engine in engines:
        load(engine, "a", 1)
        load(engine, "b", 2)
    for adapter in (None, "a", "b", {"a": 0.5}, {"a": 0.5, "b": 1.0}, {"b": 1.0, "a": 0.5}):
        assert answers(cached, [SHARED], [adapter]) == answers(plain, [SHARED], [adapter])
        assert num_hits(cached) == 0, f"{adapter} hit another's pages"
    before = cached.scheduler.prefix_cache.stats().num_cached_pages
    for engine in engines:
        engine.unload_adapter("a")
        load(engine, "a", 3)
    assert cached.scheduler.prefix_cache.stats().num_cached_pages < before, "a's pages are gone"
    assert answers(cached, [SHARED], ["a"]) == answers(plain, [SHARED], ["a"])
    assert num_hits(cached) == 0, "a reload hit the pages of the old weights"
    assert answers(cached, [SHARED], ["a"]) == answers(plain, [SHARED], ["a"])
    assert num_hits(cached) == 56


@pytest.mark.parametrize("cached", [True, False])
def test_preemption_gives_the_same_tokens(cached: bool, bases: Path, make_engine: Any) -> None:
    prompts = [SHARED[index : index + 9 + 2 * index] for index in range(8)]
    adapters: list[Any] = [None, "a", "b", {"a": 0.5}] * 2
    found = []
    for kv_tokens in (4096, 64):
        memory = {"page_size": 4, "max_kv_tokens": kv_tokens, "prefix_cache": cached}
        engine = make_engine(bases / "llama", memory=memory)
        load(engine, "a", 1)
        load(engine, "b", 2)
        sampling = engine.sampling_params(max_tokens=30, ignore_eos=True)
        drawn = engine.sampling_params(max_tokens=30, ignore_eos=True, temperature=1.0, seed=5)
        each = [sampling if index % 2 else drawn for index in range(len(prompts))]
        found.append([c.token_ids for c in engine.generate(prompts, each, adapters)])
        assert (engine.scheduler.num_preemptions > 0) == (kv_tokens == 64)
        engine.scheduler.check_integrity()
    assert found[0] == found[1]
