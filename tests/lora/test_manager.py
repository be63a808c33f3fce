"""The life of loads: names, identities, replacing, pinning, and that nothing is left behind."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import random_adapter

from engine.errors import RequestError
from engine.lora.ref import LoRARef, LoRAUpdateOutput, LoRAUse
from engine.serving.engine import Engine

LLAMA = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.down_proj": (128, 64)}
PROMPT = [1, 267, 334, 339]


def load(engine: Engine, name: str, seed: int, **options: Any) -> LoRAUpdateOutput:
    rank, pinned = options.pop("rank", 8), options.pop("pinned", False)
    tensors, config = random_adapter(LLAMA, rank, seed)
    ref = LoRARef(name, "memory", pinned)
    return engine.lora_manager.load_lora_adapter_from_tensors(ref, tensors, config, **options)


def answer(engine: Engine, adapter: str | None) -> tuple[int, ...]:
    sampling = engine.sampling_params(max_tokens=8, ignore_eos=True)
    return engine.generate([PROMPT], sampling, [adapter])[0].token_ids


def finish(engine: Engine, request_id: int) -> tuple[int, ...]:
    return engine.run_to_end([request_id])[0].token_ids


def start(engine: Engine, adapter: str) -> int:
    """A request that has decoded some tokens."""
    sampling = engine.sampling_params(max_tokens=8, ignore_eos=True)
    request_id = engine.add_request(PROMPT, sampling, adapter)
    for _ in range(3):
        engine.step()
    return request_id


def uses(engine: Engine, *names: str) -> list[LoRAUse]:
    return [LoRAUse(engine.lora_manager.resolve(name).lora_id) for name in names]


def slots_left(engine: Engine) -> int:
    manager = engine.lora_manager
    return manager.max_loras_per_batch - len(manager.residents)


def test_replacing_is_atomic_and_running_requests_keep_their_weights(
    bases: Path, make_engine: Any
) -> None:
    engine = make_engine(bases / "llama")
    for name, seed in (("old", 1), ("new", 2)):
        assert load(engine, name, seed).success
    old, new = answer(engine, "old"), answer(engine, "new")
    assert old != new
    engine.unload_adapter("new")
    first = engine.lora_manager.resolve("old").lora_id
    request_id = start(engine, "old")
    refused = load(engine, "old", 2)
    assert not refused.success and "replace=true" in refused.error_message
    assert load(engine, "old", 2, replace=True).success
    assert engine.lora_manager.resolve("old").lora_id != first
    sampling = engine.sampling_params(max_tokens=8, ignore_eos=True)
    newer = engine.add_request(PROMPT, sampling, "old")
    completions = engine.run_to_end([request_id, newer])
    assert [completion.token_ids for completion in completions] == [old, new]
    assert [ref.name for ref in engine.list_adapters()] == ["old"]
    assert slots_left(engine) == 3, "the old weights went with their last request"


def test_a_refused_replacement_leaves_the_old_adapter(bases: Path, make_engine: Any) -> None:
    engine = make_engine(bases / "llama", lora={"max_lora_rank": 8})
    assert load(engine, "a", 1, pinned=True).success
    before, ref = answer(engine, "a"), engine.lora_manager.resolve("a")
    tensors, config = random_adapter({"model.layers.9.self_attn.q_proj": (64, 64)}, 8, 3)
    manager = engine.lora_manager
    for output in (
        manager.load_lora_adapter_from_tensors(LoRARef("a", "x"), tensors, config, replace=True),
        manager.load_lora_adapter(LoRARef("a", "no/such/folder"), replace=True),
        load(engine, "a", 2, rank=65, replace=True),
    ):
        assert not output.success
        assert manager.resolve("a") == ref
        assert answer(engine, "a") == before


def test_a_pinned_adapter_is_replaced_by_a_pinned_one_in_few_slots(
    bases: Path, make_engine: Any
) -> None:
    lora = {"max_loras_per_batch": 2, "max_lora_rank": 8, "pool_rank_rows": 32}
    engine = make_engine(bases / "llama", lora=lora)
    assert load(engine, "a", 1, pinned=True).success
    assert "must stay free" in load(engine, "b", 1, pinned=True).error_message
    for seed in (2, 3):
        assert load(engine, "a", seed, pinned=True, replace=True).success
        (resident,) = engine.lora_manager.residents
        assert resident.pinned and resident.lora_id == engine.lora_manager.resolve("a").lora_id
    request_id = start(engine, "a")
    running = engine.lora_manager.resolve("a").lora_id
    output = load(engine, "a", 4, pinned=True, replace=True)
    assert output.success, "the running one is no longer pinned and leaves with its request"
    finish(engine, request_id)
    assert running not in {r.lora_id for r in engine.lora_manager.residents}
    engine.scheduler.check_integrity()


def test_an_unloaded_adapter_serves_its_requests_and_frees_its_slot_however_they_end(
    bases: Path, make_engine: Any
) -> None:
    engine = make_engine(bases / "llama")
    load(engine, "a", 1)
    expected = answer(engine, "a")
    first, second = start(engine, "a"), start(engine, "a")
    engine.unload_adapter("a")
    assert engine.list_adapters() == () and slots_left(engine) == 3
    assert finish(engine, first) == expected
    assert slots_left(engine) == 3, "one request still runs"
    engine.abort(second)
    assert slots_left(engine) == 4


def test_a_thousand_reloads_leave_nothing(bases: Path, make_engine: Any) -> None:
    engine = make_engine(bases / "llama")
    tensors, config = random_adapter(LLAMA, 32, 1)
    manager = engine.lora_manager
    for count in range(1000):
        if count == 200:
            before = resident_bytes()
        ref = LoRARef("a", "memory")
        assert manager.load_lora_adapter_from_tensors(ref, tensors, config, replace=True).success
        if count % 100 == 0:
            answer(engine, "a")
    assert resident_bytes() - before < 8 << 20
    assert len(manager._by_id) == len(manager.residents) == 1
    assert list(manager._residency.slots.ranges.taken.values()) == [32]
    engine.unload_adapter("a")
    assert not manager._by_id and not manager.residents
    engine.scheduler.check_integrity()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_several_adapters_of_one_request_become_resident_together_or_not_at_all(
    bases: Path, make_engine: Any
) -> None:
    lora = {"max_loras_per_batch": 3, "max_lora_rank": 16, "pool_rank_rows": 24}
    engine = make_engine(bases / "llama", lora=lora)
    manager = engine.lora_manager
    for index, (name, rank) in enumerate({"idle": 8, "small": 8, "big": 16, "vast": 16}.items()):
        load(engine, name, index, rank=rank)
    with pytest.raises(RequestError, match="big, vast do not fit together"):
        manager.open(uses(engine, "big", "vast"))
    pair = uses(engine, "small", "big")
    manager.open(pair)
    other = uses(engine, "vast")
    manager.open(other)
    assert manager.activate(other)
    assert not manager.activate(pair)
    assert [r.users for r in manager.residents if r.lora_id == pair[0].lora_id] in ([0], [])
    manager.deactivate(other)
    assert manager.activate(pair), "idle adapters between them leave"
    refused = load(engine, "pinned", 9, pinned=True)
    assert "several adapters are open" in refused.error_message
    manager.deactivate(pair)
    manager.close(pair)
    manager.close(other)
    engine.scheduler.check_integrity()


def test_saved_modules_need_their_matrices(bases: Path, make_engine: Any) -> None:
    tensors, config = random_adapter(LLAMA, 8, 1)
    tensors["base_model.model.lm_head.weight"] = torch.randn(512, 64)
    config["modules_to_save"] = ["lm_head"]
    engine = make_engine(bases / "llama", lora={"saved_modules": 0})
    manager = engine.lora_manager
    output = manager.load_lora_adapter_from_tensors(LoRARef("a", "x"), tensors, config)
    assert "lora.saved_modules allows 0 matrices" in output.error_message
    engine = make_engine(bases / "llama", lora={"saved_modules": 1})
    manager = engine.lora_manager
    pinned = manager.load_lora_adapter_from_tensors(LoRARef("a", "x", True), tensors, config)
    assert "cannot be pinned" in pinned.error_message
    for name in "ab":
        output = manager.load_lora_adapter_from_tensors(LoRARef(name, "x"), tensors, config)
        assert output.report is not None and output.report.num_saved_modules == 1
    assert answer(engine, "a") == answer(engine, "b"), "they take turns"


def test_what_becomes_of_loads_is_told(bases: Path, make_engine: Any) -> None:
    engine = make_engine(bases / "llama", lora={"max_loras_per_batch": 2})
    manager = engine.lora_manager
    for seed, name in enumerate("abc"):
        load(engine, name, seed, rank=seed + 1)
    start(engine, "a")
    told = [(own.ref.name, own.rank, own.resident, own.num_open) for own in manager.statuses()]
    assert told == [("a", 1, True, 1), ("b", 2, True, 0), ("c", 3, False, 0)]
    assert (manager.traffic.num_loads, manager.traffic.num_evictions) == (2, 0)
    before = manager.traffic.load_seconds
    answer(engine, "c")
    traffic = manager.traffic
    assert (traffic.num_loads, traffic.num_evictions) == (3, 1)
    assert traffic.load_seconds > before > 0
    assert [own.resident for own in manager.statuses()] == [True, False, True]
    assert manager.name(uses(engine, "c")[0]) == "c"
