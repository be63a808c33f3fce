"""The in-process API: sampling that depends on the request alone, stops, refusals, aborts, adapters
coming and going.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import random_adapter

from engine.errors import AdapterError, CapacityError, RequestError
from engine.runtime.request import FinishReason
from engine.serving.engine import Engine

PROMPT = [1, 267, 334, 339, 326, 344, 330]
OTHERS = [[5, 6, 7], [9, 10], [300, 301, 302, 303], [44] * 11]
QV = {
    f"model.layers.{layer}.self_attn.{name}": (64, width)
    for layer in (0, 1)
    for name, width in (("q_proj", 64), ("v_proj", 32))
}


@pytest.fixture
def engine(bases: Path, make_engine: Any) -> Engine:
    made: Engine = make_engine(bases / "llama")
    return made


def load(engine: Engine, name: str, seed: int, rank: int = 4) -> None:
    engine.load_adapter_from_tensors(name, *random_adapter(QV, rank, seed))


def greedy(engine: Engine, **changes: Any) -> Any:
    return engine.sampling_params(
        **({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | changes)
    )


def test_a_seeded_sample_depends_on_the_request_alone(engine: Engine) -> None:
    load(engine, "a", 1)
    sampling = greedy(engine, temperature=1.0, top_p=0.9, seed=7, max_tokens=12)
    alone = engine.generate([PROMPT], sampling)[0].token_ids
    among = engine.generate(
        [*OTHERS, PROMPT, *OTHERS],
        [greedy(engine, temperature=2.0, seed=i) for i in range(4)]
        + [sampling]
        + [greedy(engine)] * 4,
        ["a", None, "a", None, None, "a", "a", None, None],
    )[4].token_ids
    assert alone == among
    assert (
        alone
        != engine.generate(
            [PROMPT], greedy(engine, temperature=1.0, top_p=0.9, seed=8, max_tokens=12)
        )[0].token_ids
    )


def test_stop_ids_and_max_tokens(engine: Engine) -> None:
    free = engine.generate([PROMPT], greedy(engine))[0]
    assert (len(free.token_ids), free.finish_reason) == (8, FinishReason.length)
    stopped = engine.generate([PROMPT], greedy(engine, stop_token_ids=(free.token_ids[3],)))[0]
    assert stopped.token_ids == free.token_ids[:4]
    assert stopped.finish_reason is FinishReason.stop
    assert free.text.startswith(stopped.text)


def test_stop_string_cuts_the_text(engine: Engine) -> None:
    free = engine.generate([PROMPT], greedy(engine, max_tokens=20))[0]
    wanted = free.text[4:6]
    stopped = engine.generate([PROMPT], greedy(engine, max_tokens=20, stop=(wanted,)))[0]
    assert stopped.text == free.text[: free.text.index(wanted)]
    assert stopped.finish_reason is FinishReason.stop


@pytest.mark.parametrize(
    ("prompt", "changes", "adapter", "message"),
    [
        ([], {}, None, "the prompt is empty"),
        ([1, 512], {}, None, r"token ids \[512\] are outside the vocabulary of 0 to 511"),
        ([1] * 510, {"max_tokens": 8}, None, "exceed the model's 512 positions by 6"),
        ([1], {}, "nobody", "adapter 'nobody' is not loaded; loaded adapters: known"),
    ],
)
def test_refusals_say_what_and_how_much_and_serving_goes_on(
    engine: Engine, prompt: list[int], changes: dict[str, int], adapter: str | None, message: str
) -> None:
    load(engine, "known", 1)
    before = engine.generate([PROMPT], greedy(engine))[0].token_ids
    with pytest.raises((RequestError, AdapterError), match=message):
        engine.generate([PROMPT, prompt], greedy(engine, **changes), [None, adapter])
    assert not engine.has_work
    assert engine.generate([PROMPT], greedy(engine))[0].token_ids == before


def test_abort_at_every_phase_gives_all_back(engine: Engine) -> None:
    load(engine, "a", 1)
    for steps in (0, 1, 2, 5):
        ids = [engine.add_request([7] * 100, greedy(engine), "a") for _ in range(20)]
        for _ in range(steps):
            engine.step()
        for request_id in ids:
            engine.abort(request_id)
            engine.abort(request_id)
        assert not engine.has_work
        engine.scheduler.check_integrity()
        assert engine.scheduler.prefix_cache.num_available == engine.scheduler.pages.num_pages
    engine.unload_adapter("a")
    assert engine.list_adapters() == ()


def test_unload_while_running_lets_it_finish_with_its_weights(engine: Engine) -> None:
    load(engine, "a", 1)
    expected = engine.generate([PROMPT], greedy(engine), "a")[0].token_ids
    assert expected != engine.generate([PROMPT], greedy(engine))[0].token_ids
    request_id = engine.add_request(PROMPT, greedy(engine), "a")
    engine.step()
    engine.unload_adapter("a")
    with pytest.raises(AdapterError, match="adapter 'a' is not loaded; loaded adapters: none"):
        engine.add_request(PROMPT, greedy(engine), "a")
    load(engine, "a", 2)
    assert engine.run_to_end([request_id])[0].token_ids == expected
    assert engine.generate([PROMPT], greedy(engine), "a")[0].token_ids != expected
    engine.scheduler.check_integrity()


def test_evicted_adapters_come_back_from_host_memory(engine: Engine) -> None:
    names = [f"a{i}" for i in range(9)]
    for i, name in enumerate(names):
        load(engine, name, i, rank=3 + i)
    first = [engine.generate([PROMPT], greedy(engine), name)[0].token_ids for name in names]
    again = [engine.generate([PROMPT], greedy(engine), name)[0].token_ids for name in names]
    assert first == again and len(set(first)) > 5
    mixed = engine.generate([PROMPT] * 9, greedy(engine), names)
    assert [completion.token_ids for completion in mixed] == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name twice", "'a' is already loaded from tensors; unload it first"),
        ("rank", "has rank 65, lora.max_lora_rank is 64; raise it"),
        ("no directory", "/nowhere"),
    ],
)
def test_refused_adapters_leave_no_trace(engine: Engine, change: str, message: str) -> None:
    load(engine, "a", 1)
    before = engine.generate([PROMPT], greedy(engine), "a")[0].token_ids
    with pytest.raises(AdapterError, match=message):
        if change == "name twice":
            load(engine, "a", 2)
        elif change == "rank":
            load(engine, "b", 2, rank=65)
        else:
            engine.load_adapter("b", "/nowhere")
    assert [ref.name for ref in engine.list_adapters()] == ["a"]
    assert engine.generate([PROMPT], greedy(engine), "a")[0].token_ids == before


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.generate([PROMPT], greedy(engine))[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", lambda rows: torch.zeros(1) @ torch.zeros(2))
        failed = engine.generate([PROMPT, PROMPT], greedy(engine))
    assert all(
        completion.finish_reason is FinishReason.error and completion.error for completion in failed
    )
    engine.scheduler.check_integrity()
    assert engine.generate([PROMPT], greedy(engine))[0].token_ids == before


def test_the_pool_costs_what_its_rows_cost_and_kv_shrinks_by_it(
    bases: Path, make_engine: Any
) -> None:
    small = make_engine(bases / "llama", lora={"pool_rank_rows": 64})
    large = make_engine(bases / "llama", lora={"pool_rank_rows": 1024})
    difference = (1024 - 64) * small.lora_manager.pool_bytes_per_row
    lost = (small.kv_pool.num_tokens - large.kv_pool.num_tokens) * small.kv_pool.bytes_per_token
    page = small.kv_pool.page_size * small.kv_pool.bytes_per_token
    assert abs(lost - difference) <= page
    with pytest.raises(CapacityError, match=r"lora_manager needs .* raise memory.fraction"):
        make_engine(bases / "llama", lora={"pool_rank_rows": 1 << 16})


def test_bf16_runs(bases: Path, make_engine: Any) -> None:
    from engine.config import DType

    engine = make_engine(bases / "llama", model={"dtype": DType.bfloat16})
    load(engine, "a", 1)
    served = engine.generate([PROMPT, PROMPT], greedy(engine), [None, "a"])
    assert served[0].token_ids != served[1].token_ids
