"""The engine process's inside, in this process: what must not stall others, faults of the engine,
how often counts are sent.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import DATA
from fake_client import tensors_body
from front_support import offline_engine
from recorder import until

from engine.server.host import EngineHost
from engine.server.messages import (
    Abort,
    AdapterData,
    LoadAdapter,
    LoadAdapterTensors,
    Reply,
    StepReport,
    Submit,
    TokenDelta,
    UnloadAdapter,
)
from engine.serving.engine import Engine

PROMPT = [1, 267, 334, 339]
CASE = DATA / "cases" / "c22_q_only_gqa"
ADAPTER, CONFIG = CASE / "adapter", "adapter_config.json"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with offline_engine(tmp_path_factory.mktemp("host")) as made:
        yield made


class Hosted:
    """A running host and all that it has sent."""

    def __init__(self, engine: Engine) -> None:
        self.reports: list[StepReport] = []
        self.host = EngineHost(self.reports.append)
        self.thread = threading.Thread(target=self.host.run, args=(engine,))
        self.thread.start()

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for report in self.reports for delta in report.deltas]

    @property
    def replies(self) -> list[Reply]:
        return [reply for report in self.reports for reply in report.replies]

    def ended(self, key: int) -> bool:
        return any(delta.key == key and delta.finish_reason for delta in self.deltas)

    def answered(self, key: int) -> bool:
        return any(reply.key == key for reply in self.replies)

    def submit(self, key: int, **sampling: Any) -> None:
        self.host.take(Submit(key, PROMPT, sampling))


@pytest.fixture
def hosted(engine: Engine) -> Iterator[Hosted]:
    made = Hosted(engine)
    yield made
    made.host.stop()
    made.thread.join()
    assert not engine.has_work
    engine.scheduler.check_integrity()


class Gate:
    """Holds up whoever calls `wait` until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(10)


def test_others_decode_while_a_grammar_compiles(
    engine: Engine, hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, matcher = Gate(), engine.grammars.matcher

    def slow(kind: str, text: str) -> Any:
        if threading.current_thread() is not hosted.thread:
            gate.wait()
        return matcher(kind, text)

    monkeypatch.setattr(engine.grammars, "matcher", slow)
    hosted.submit(1, regex="[ab]{3}")
    hosted.submit(2, regex="[ab]{4}")
    assert gate.reached.wait(10)
    hosted.submit(3, max_tokens=4)
    until(lambda: hosted.ended(3))
    hosted.host.take(Abort(4, 2))
    gate.opened.set()
    until(lambda: hosted.ended(1))
    hosted.submit(5, max_tokens=4)
    until(lambda: hosted.ended(5))
    assert {delta.key for delta in hosted.deltas} == {1, 3, 5}, "what was given up never ran"
    assert "".join(delta.text for delta in hosted.deltas if delta.key == 1).strip("ab") == ""
    assert hosted.replies == []


def test_others_decode_while_an_adapter_is_read(
    engine: Engine, hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = Gate(), engine.read_adapter

    def slow(name: str, path: str | Path) -> Any:
        gate.wait()
        return read(name, path)

    monkeypatch.setattr(engine, "read_adapter", slow)
    hosted.host.take(LoadAdapter(1, "late", str(ADAPTER)))
    assert gate.reached.wait(10)
    hosted.submit(2, max_tokens=4)
    until(lambda: hosted.ended(2))
    assert hosted.replies == []
    gate.opened.set()
    until(lambda: hosted.answered(1))
    (report,) = (report for report in hosted.reports if report.replies)
    (reply,) = report.replies
    assert report.adapters is not None and report.adapters[-1] == reply.adapter
    hosted.host.take(UnloadAdapter(3, "late"))
    until(lambda: hosted.answered(3))
    assert not any(reply.error for reply in hosted.replies)


def test_a_fault_of_the_engine_ends_requests_with_an_error_and_the_host_goes_on(
    engine: Engine, hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", broken)
        hosted.submit(1, n=2)
        until(lambda: len(hosted.deltas) == 2)
    assert [(own.index, own.token_id, own.error) for own in hosted.deltas] == [
        (0, None, "boom"),
        (1, None, "boom"),
    ]
    hosted.submit(2, max_tokens=1)
    until(lambda: hosted.ended(2))


def test_a_fault_in_a_command_is_answered(
    engine: Engine, hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(engine, "unload_adapter", broken)
    hosted.host.take(UnloadAdapter(1, "late"))
    until(lambda: hosted.answered(1))
    assert hosted.replies == [Reply(1, "KeyError", "'late'")]


def test_data_of_an_adapter_is_kept_until_it_is_loaded_refused_or_given_up(
    engine: Engine, hosted: Hosted
) -> None:
    data, config = tensors_body(CASE), msgspec.json.decode((ADAPTER / CONFIG).read_bytes())
    half = len(data) // 2
    for key, pieces in ((1, [data[:half], data[half:]]), (2, [data[:half]]), (3, [data])):
        for number, piece in enumerate(pieces):
            hosted.host.take(AdapterData(10 * key + number, key, piece))
    hosted.host.take(LoadAdapterTensors(1, "late", config))
    hosted.host.take(LoadAdapterTensors(2, "half", config))
    hosted.host.take(Abort(4, 3))
    until(lambda: hosted.answered(1) and hosted.answered(2))
    first, second = sorted(hosted.replies, key=lambda reply: reply.key)
    assert first.adapter is not None and first.adapter.name == "late"
    assert (second.kind, second.adapter) == ("AdapterError", None)
    assert "the data is no safetensors file" in second.error
    assert hosted.host._uploads._files == {}
    hosted.host.take(UnloadAdapter(5, "late"))


def test_a_turn_is_one_report_and_counts_come_seldom_but_always_at_the_end(
    engine: Engine, hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.host.STATS_INTERVAL_S", 60.0)
    before = engine.scheduler.num_generated_tokens
    hosted.submit(1, max_tokens=30, ignore_eos=True)
    hosted.submit(2, max_tokens=30, ignore_eos=True)
    until(lambda: hosted.ended(1) and hosted.ended(2))
    until(lambda: hosted.reports[-1].stats is not None)
    stats = [report.stats for report in hosted.reports if report.stats is not None]
    assert len(stats) <= 2 and stats[-1].num_running == 0
    assert stats[-1].generated_tokens_total - before == 60
    assert len(hosted.reports) <= 45, "both requests share the reports of their turns"
