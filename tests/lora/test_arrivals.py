"""Weights that are on their way to the pool: whoever needs them waits, the others go on, and nobody
takes their place.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.lora.pool_copies import Arrival
from engine.serving.engine import Engine

CASES = Path(__file__).parent.parent / "data" / "cases"
NAMES = ("c00_control_all7", "c06_rslora_r16", "c16_rank_1")


class Event:
    """A copy's end, as a test decides."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


@pytest.fixture
def engine(bases: Path, make_engine: Callable[..., Engine]) -> Engine:
    lora = {"max_loras_per_batch": 2, "pool_rank_rows": 128}
    engine = make_engine(bases / "llama", lora=lora, memory_bytes=128 << 20)
    for name in NAMES:
        engine.load_adapter(name, CASES / name / "adapter")
    return engine


def slow_copies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Copies from now on arrive when their event, in the order of the copies, has passed."""
    pool = engine.lora_manager._residency.pool
    events: list[Event] = []
    write = pool.write

    def slowly(*args: Any) -> Arrival:
        write(*args)
        events.append(Event())
        return Arrival(events[-1])

    monkeypatch.setattr(pool, "write", slowly)
    return events


def greedy(name: str | None) -> list[int]:
    case = json.loads((CASES / (name or NAMES[0]) / "expected.json").read_text())
    return list(case["greedy_ids" if name else "base_greedy_ids"][0][:6])


def test_others_decode_meanwhile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    events = slow_copies(engine, monkeypatch)
    prompt = json.loads((CASES / NAMES[0] / "expected.json").read_text())["prompts"][0]
    sampling = engine.sampling_params(max_tokens=6, ignore_eos=True)
    late = engine.add_request(prompt, sampling, NAMES[2])
    base = engine.add_request(prompt, sampling)
    early = engine.add_request(prompt, sampling, NAMES[1])
    seen: set[int] = set()
    served = engine.run_to_end(
        [base, early], lambda events: seen.update(e.request_id for e in events)
    )
    assert [list(c.token_ids) for c in served] == [greedy(None), greedy(NAMES[1])]
    assert seen == {base, early} and len(events) == 1
    assert engine.step() == [] and engine.has_work
    events[0].passed = True
    (completion,) = engine.run_to_end([late])
    assert list(completion.token_ids) == greedy(NAMES[2])
    engine.lora_manager.check_integrity()


def test_nobody_takes_the_place_of_what_is_under_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = slow_copies(engine, monkeypatch)
    prompt = json.loads((CASES / NAMES[0] / "expected.json").read_text())["prompts"][0]
    sampling = engine.sampling_params(max_tokens=6, ignore_eos=True)
    order = (NAMES[2], NAMES[0], NAMES[1])
    ids = [engine.add_request(prompt, sampling, name) for name in order]
    for _ in range(3):
        assert engine.step() == [] and len(events) == 2
    for index, (request_id, name) in enumerate(zip(ids, order, strict=True)):
        events[index].passed = True
        (completion,) = engine.run_to_end([request_id])
        assert list(completion.token_ids) == greedy(name)
        engine.step()
        assert len(events) == 3, "the third came when the first had left"
    engine.lora_manager.check_integrity()
