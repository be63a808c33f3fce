"""What a request may ask for, end to end: samples, prompt log-probabilities, weighted adapters,
penalties and bans, stops, refusals, and faults that stay with their request.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import prompt_logits, random_adapter

from engine.errors import AdapterError, RequestError
from engine.runtime.request import FinishReason
from engine.serving.engine import Engine
from engine.serving.group import sample_seed

PROMPT = [1, 267, 334, 339, 326, 344, 330]
QV = {
    f"model.layers.{layer}.self_attn.{name}": (64, width)
    for layer in (0, 1)
    for name, width in (("q_proj", 64), ("v_proj", 32))
}


@pytest.fixture
def engine(bases: Path, make_engine: Any) -> Engine:
    made: Engine = make_engine(bases / "llama")
    for seed, name in enumerate("ab"):
        made.load_adapter_from_tensors(name, *random_adapter(QV, 4, seed))
    return made


def params(engine: Engine, **changes: Any) -> Any:
    return engine.sampling_params(**({"max_tokens": 8, "ignore_eos": True} | changes))


def one(engine: Engine, adapter: Any = None, **changes: Any) -> Any:
    return engine.generate([PROMPT], params(engine, **changes), [adapter])[0]


def all_is_given_back(engine: Engine) -> bool:
    engine.scheduler.check_integrity()
    for name in ("a", "b"):
        engine.unload_adapter(name)
    return not engine.has_work and not engine._samples and not engine._groups


# ------------------------------------------------------------------ samples


def test_sample_0_is_the_request_itself_and_others_have_their_own_seeds(engine: Engine) -> None:
    drawn = {"temperature": 1.0, "seed": 7}
    alone = [one(engine, "a", **(drawn | {"seed": sample_seed(7, i)})) for i in range(4)]
    samples = engine.generate([PROMPT, PROMPT], params(engine, n=4, **drawn), ["a", None])
    assert [own.token_ids for own in samples[:4]] == [own.token_ids for own in alone]
    assert sample_seed(7, 0) == 7 and len({own.token_ids for own in samples}) > 6
    assert [own.index for own in samples] == [0, 1, 2, 3] * 2
    assert [own.adapter for own in samples] == ["a"] * 4 + [None] * 4
    assert len({own.request_id for own in samples}) == 2
    assert all_is_given_back(engine)


def test_seeds_of_samples_are_spread_over_63_bits() -> None:
    seeds = [sample_seed(seed, index) for seed in (0, 1, 2**63 - 1) for index in range(1, 128)]
    assert len(set(seeds)) == len(seeds)
    assert 0 <= min(seeds) < 1 << 57 and 63 << 57 <= max(seeds) < 1 << 63


def test_events_tell_samples_apart_and_abort_ends_all(engine: Engine) -> None:
    asked = params(engine, n=3, temperature=1.0, seed=1, stop_token_ids=[250])
    request_id = engine.add_request(PROMPT, asked, "a")
    texts: dict[int, str] = {}
    found = engine.run_to_end(
        [request_id],
        lambda events: [
            texts.update({event.index: texts.get(event.index, "") + event.text})
            for event in events
            if event.request_id == request_id
        ],
    )
    assert [texts[own.index] for own in found] == [own.text for own in found]
    for num_steps in range(4):
        request_id = engine.add_request(PROMPT, asked, "a")
        for _ in range(num_steps):
            engine.step()
        engine.abort(request_id)
        assert not engine.has_work
    with pytest.raises(RequestError, match=r"requests \[1\d\] are not open"):
        engine.run_to_end([request_id])
    assert all_is_given_back(engine)


def test_a_refused_sample_withdraws_the_others(engine: Engine, monkeypatch: Any) -> None:
    submit, count = engine.scheduler.submit, iter(range(9))

    def third_fails(request: Any) -> None:
        if next(count) == 2:
            raise RequestError("full")
        submit(request)

    monkeypatch.setattr(engine.scheduler, "submit", third_fails)
    with pytest.raises(RequestError, match="full"):
        engine.add_request(PROMPT, params(engine, n=4), "a")
    assert all_is_given_back(engine)


# ------------------------------------------------------------------ log-probabilities of prompts


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("adapter", [None, "a"])
def test_prompt_logprobs_are_those_of_prefills_of_each_length(
    engine: Engine, bases: Path, make_engine: Any, chunk: int, adapter: str | None
) -> None:
    expected = prompt_logits(engine, PROMPT, adapter).log_softmax(-1)
    engine = make_engine(
        bases / "llama", scheduler={"max_step_tokens": chunk, "max_running_requests": 4}
    )
    engine.load_adapter_from_tensors("a", *random_adapter(QV, 4, 0))
    asked = params(engine, prompt_logprobs=3, n=3, temperature=1.0, seed=2)
    found = engine.generate([PROMPT], asked, [adapter])
    assert all(own.prompt_logprobs == found[0].prompt_logprobs for own in found)
    first, *rest = found[0].prompt_logprobs
    assert first is None and len(rest) == len(PROMPT) - 1
    for place, entry in enumerate(rest):
        row = expected[place]
        assert entry.logprob == pytest.approx(row[PROMPT[place + 1]].item(), abs=1e-4)
        values = [value for _, value in entry.top]
        torch.testing.assert_close(torch.tensor(values), row.topk(3).values, atol=1e-4, rtol=0)
    plain = engine.generate([PROMPT], dataclasses.replace(asked, prompt_logprobs=None), [adapter])
    assert [own.token_ids for own in plain] == [own.token_ids for own in found]
    assert plain[0].prompt_logprobs == ()


def test_prompt_logprobs_come_once_with_the_first_event_and_survive_preemption(
    bases: Path, make_engine: Any
) -> None:
    found = []
    for changes in ({}, {"memory": {"max_kv_tokens": 128}}):
        engine = make_engine(bases / "llama", **changes)
        asked = params(engine, prompt_logprobs=0, max_tokens=60, logprobs=1)
        ids = [engine.add_request([*PROMPT, 9 + place], asked) for place in range(3)]
        carried: dict[int, list[int]] = {request_id: [] for request_id in ids}
        done = engine.run_to_end(
            ids,
            lambda events, carried=carried: [
                carried[event.request_id].append(len(event.prompt_logprobs)) for event in events
            ],
        )
        assert all(sizes == [8] + [0] * 59 for sizes in carried.values())
        assert all(len(own.logprobs) == len(own.token_ids) == 60 for own in done)
        found.append([[e and round(e.logprob, 3) for e in own.prompt_logprobs] for own in done])
    assert engine.scheduler.num_preemptions > 0
    assert found[0] == found[1]


# ------------------------------------------------------------------ adapters


def test_weights_of_adapters(engine: Engine) -> None:
    free = {"max_tokens": 12}
    base, a, b = (one(engine, name, **free) for name in (None, "a", "b"))
    assert one(engine, {"a": 1.0}, **free).token_ids == a.token_ids
    assert one(engine, {"a": 0.0}, **free).token_ids == base.token_ids
    assert one(engine, {"a": 0, "b": 1}, **free).token_ids == b.token_ids
    both = one(engine, {"a": 1.5, "b": -0.5}, **free)
    assert both.token_ids not in (base.token_ids, a.token_ids, b.token_ids)
    assert both.adapter == {"a": 1.5, "b": -0.5}
    mixed = engine.generate(
        [PROMPT] * 4, params(engine, **free), [{"a": 1.5, "b": -0.5}, "a", None, "b"]
    )
    assert [own.token_ids for own in mixed] == [own.token_ids for own in (both, a, base, b)]
    same = engine.generate([PROMPT] * 2, params(engine, **free), {"a": 1.5, "b": -0.5})
    assert [own.token_ids for own in same] == [both.token_ids] * 2
    assert all_is_given_back(engine)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({}, "adapter: got 0 names, allowed are 1 to 4 "),
        ({str(i): 1.0 for i in range(5)}, r"got 5 names, .* \(lora.max_loras_per_batch\)"),
        ({"a": 10.5}, "adapter 'a': got weight 10.5, allowed is a number from -10 to 10"),
        ({"a": float("nan")}, "got weight nan"), ({"a": True}, "got weight True"),
        ({"a": "1"}, "got weight '1'"), ({"a": 10**400}, "got weight 1000"),
        ({"a": 1.0, "c": 0.0}, "adapter 'c' is not loaded; loaded adapters: a, b"),
        ({3: 1.0}, "allowed is a name or a mapping"), (3, "got 3, allowed is a name or a mapping"),
    ],
)  # fmt: skip
def test_refused_adapters(engine: Engine, adapter: Any, message: str) -> None:
    with pytest.raises((RequestError, AdapterError), match=message):
        engine.add_request(PROMPT, params(engine), adapter)
    assert all_is_given_back(engine)


def test_replacing_an_adapter_leaves_running_requests_their_weights(engine: Engine) -> None:
    before = one(engine, "a").token_ids
    request_id = engine.add_request(PROMPT, params(engine), "a")
    engine.step()
    with pytest.raises(AdapterError, match="already loaded"):
        engine.load_adapter_from_tensors("a", *random_adapter(QV, 4, 5))
    engine.load_adapter_from_tensors("a", *random_adapter(QV, 4, 5), replace=True)
    assert engine.run_to_end([request_id])[0].token_ids == before
    assert one(engine, "a").token_ids != before
    assert all_is_given_back(engine)


# ------------------------------------------------------------------ logits and stops


def test_biases_bans_and_penalties(engine: Engine) -> None:
    free = one(engine, max_tokens=24)
    assert set(one(engine, logit_bias={77: 100}).token_ids) == {77}
    top = free.token_ids[0]
    assert top not in one(engine, logit_bias={top: -100}, max_tokens=24).token_ids
    pairs = [free.token_ids[place : place + 2] for place in range(23)]
    own = engine.tokenizer
    pair = next(pair for pair in pairs if tuple(own.encode(own.decode(pair))) == pair)
    again = one(engine, bad_words=[own.decode(pair)], max_tokens=24).token_ids
    assert pair not in [again[place : place + 2] for place in range(23)]
    assert set(pair) & set(again), "single tokens of it are not banned"
    varied = one(engine, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=24)
    repeated = one(engine, frequency_penalty=-2.0, max_tokens=24)
    distinct = [len(set(own.token_ids)) for own in (varied, free, repeated)]
    assert distinct[0] > distinct[2] and distinct[0] >= distinct[1] >= distinct[2]


def test_min_tokens_holds_back_end_tokens_and_stop_strings(engine: Engine) -> None:
    eager = {"logit_bias": {2: 100}, "ignore_eos": False}
    ended = one(engine, **eager)
    assert (ended.token_ids, ended.finish_reason) == ((2,), FinishReason.stop)
    longer = one(engine, min_tokens=5, **eager)
    assert len(longer.token_ids) == 6 and longer.token_ids[-1] == 2
    assert 2 not in longer.token_ids[:5]
    by_id = one(engine, min_tokens=3, logit_bias={9: 100}, stop_token_ids=[9])
    assert by_id.token_ids.index(9) == 3 == len(by_id.token_ids) - 1

    free = one(engine, max_tokens=20)
    stop = free.text[2:4]
    cut = one(engine, max_tokens=20, stop=stop, logprobs=1)
    assert cut.text == free.text[: free.text.index(stop)]
    kept = one(engine, max_tokens=20, stop=stop, include_stop_str_in_output=True)
    assert kept.text == cut.text + stop and kept.token_ids == cut.token_ids
    assert len(cut.logprobs) == len(cut.token_ids)
    late = one(engine, max_tokens=20, stop=stop, min_tokens=len(cut.token_ids) + 1)
    assert late.token_ids[: len(cut.token_ids) + 1] == free.token_ids[: len(cut.token_ids) + 1]
    assert late.text.startswith(kept.text)


# ------------------------------------------------------------------ refusals and faults


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([1, True], {}, "prompt: got True among the token ids, allowed are ints"),
        ([1, 2.0], {}, "got 2.0 among the token ids"), ([-1], {}, r"token ids \[-1\] are outside"),
        (None, {}, "got None, allowed"), ("a\udc00", {}, "half of a surrogate pair"),
        ("", {}, "the prompt is empty"),
        (PROMPT, {"logit_bias": {512: 1}}, r"logit_bias: token ids \[512\] are outside the vocab"),
        (PROMPT, {"max_tokens": 506}, "exceed the model's 512 positions by 1"),
    ],
)  # fmt: skip
def test_refused_prompts(
    engine: Engine, prompt: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, params(engine, **changes), "a")
    with pytest.raises(RequestError, match=r"priority: got 1\.5, allowed is a whole number"):
        engine.add_request(PROMPT, priority=1.5)  # type: ignore[arg-type]
    assert all_is_given_back(engine)


def test_numbers_out_of_range_end_their_request_alone(engine: Engine) -> None:
    engine.load_adapter_from_tensors("faulty", *random_adapter(QV, 4, 3, scale=1e30))
    adapters = ["a", "faulty", None, {"b": 0.5, "faulty": 0.1}, "b"]
    alone = [one(engine, name) for name in adapters]
    together = engine.generate([PROMPT] * 5, params(engine), adapters)
    for single, own in zip(alone, together, strict=True):
        assert (single.token_ids, single.finish_reason) == (own.token_ids, own.finish_reason)
    for place, names in ((1, "'faulty'"), (3, "'b', 'faulty'")):
        assert together[place].finish_reason is FinishReason.error
        assert together[place].error.startswith(
            f"numbers went out of range (inf or nan) with adapter {names}; check its weights"
        )
        assert together[place].token_ids == ()
    asked = params(engine, n=2, prompt_logprobs=1)
    assert {own.finish_reason for own in engine.generate([PROMPT], asked, "faulty")} == {
        FinishReason.error
    }
    engine.add_request([7] * 150, asked, "faulty")
    events = engine.step()
    assert [event.finish_reason for event in events] == [FinishReason.error], "its first chunk"
    while engine.has_work:
        engine.step()
    engine.unload_adapter("faulty")
    assert all_is_given_back(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_out_of_range_end_their_request_alone(
    engine: Engine, value: float, monkeypatch: Any
) -> None:
    run = engine.runner.run

    def broken(rows: Any) -> Any:
        output = run(rows)
        if len(rows) == 3:
            output.logits[1, 5] = value
        return output

    expected = one(engine).token_ids
    monkeypatch.setattr(engine.runner, "run", broken)
    found = engine.generate([PROMPT] * 3, params(engine))
    assert [own.finish_reason.value for own in found] == ["length", "error", "length"]
    assert found[1].error.startswith("the base model's numbers went out of range (inf or nan)")
    assert found[0].token_ids == found[2].token_ids == expected


def test_priority_reaches_the_scheduler(engine: Engine) -> None:
    ids = [engine.add_request(PROMPT, params(engine, n=2), priority=p) for p in (0, 5)]
    waiting = {request.request_id: request.priority for request in engine.scheduler.waiting}
    assert [waiting[request_id] for request_id in ids] == [0, 5]
    assert sorted(waiting.values()) == [0, 0, 5, 5]
    engine.run_to_end(ids)
