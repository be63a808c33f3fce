"""The load tool: what it draws, how it counts, and a whole run against a server that misbehaves."""

import argparse
import asyncio
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import load as load_tool
from fuzz_requests import Generator
from load_report import Outcome, Sample, percentile, summary, table
from load_workload import Lengths, Workload, popularity

LENGTHS = Lengths((2, 5), (3, 6))


# ---------------------------------------------------------------------- what is drawn


def test_popularity_formulas() -> None:
    assert popularity("uniform", 4, 9.0) == [0.25] * 4
    assert popularity("slora", 4, 1.0) == pytest.approx([0.25] * 4)
    assert popularity("slora", 4, 0.5) == pytest.approx(
        [0.5, math.sqrt(0.5) - 0.5, math.sqrt(0.75) - math.sqrt(0.5), 1 - math.sqrt(0.75)]
    )
    assert popularity("zipf", 3, 1.0) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    for kind in ("uniform", "slora", "zipf"):
        assert sum(popularity(kind, 50, 0.7)) == pytest.approx(1.0)


def test_a_workload_draws_what_was_asked() -> None:
    names = ["a", "b", "c"]
    workload = Workload("base", names, LENGTHS, kind="zipf", base_share=0.2, num_prompts=4)
    asks = [workload.next() for _ in range(4000)]
    counts = Counter(ask.model for ask in asks)
    shares = {"base": 0.2, "a": 0.8 * 6 / 11, "b": 0.8 * 3 / 11, "c": 0.8 * 2 / 11}
    for name, share in shares.items():
        assert counts[name] / len(asks) == pytest.approx(share, abs=0.03), name
    assert len({ask.prompt for ask in asks}) == 4
    assert all(2 <= len(ask.prompt.split()) <= 5 and 3 <= ask.max_tokens <= 6 for ask in asks)
    again = Workload("base", names, LENGTHS, kind="zipf", base_share=0.2, num_prompts=4)
    assert [again.next() for _ in range(100)] == asks[:100]


def test_without_adapters_all_goes_to_the_base() -> None:
    workload = Workload("base", [], LENGTHS, base_share=0.0)
    assert {workload.next().model for _ in range(50)} == {"base"}


def test_arrivals_are_poisson() -> None:
    gaps = Workload("base", [], LENGTHS).gaps(20.0)
    drawn = [next(gaps) for _ in range(5000)]
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(0.05, rel=0.05)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in drawn) / len(drawn))
    assert deviation == pytest.approx(mean, rel=0.1)


# ---------------------------------------------------------------------- what is counted


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, p) for p in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert percentile([3.0], 99) == 3.0
    assert math.isnan(percentile([], 50))


def outcome(*token_times_s: float, kind: str = "completed", start_s: float = 0.0) -> Outcome:
    times = list(token_times_s)
    end_s = times[-1] if times else start_s
    return Outcome(start_s, kind, "", "x", len(times), times, end_s)


def test_a_summary() -> None:
    outcomes = [
        outcome(0.1, 0.2, 0.3),
        outcome(0.5, 0.6, start_s=0.2),
        outcome(kind="refused 429"),
        outcome(0.1, kind="disconnected"),
    ]
    samples = [
        Sample(float(i), rss - 5, 5, 2, 1) for i, rss in enumerate([10, 100, 100, 100, 110, 110])
    ]
    numbers = summary(outcomes, 2.0, {"ttft": 0.2}, samples)
    assert numbers["kinds"] == {"completed": 2, "refused 429": 1, "disconnected": 1}
    assert numbers["output_tokens_per_s"] == 2.5 and numbers["completed_per_s"] == 1.0
    assert numbers["goodput_per_s"] == 0.5, "only the first one had its token within 200 ms"
    assert numbers["latency_s"]["ttft"]["p99"] == pytest.approx(0.3)
    assert numbers["latency_s"]["itl"]["p50"] == pytest.approx(0.1)
    assert numbers["rss_second_half"]["spread"] == pytest.approx(0.1)
    assert numbers["rss_second_half"]["growth"] == pytest.approx(0.1)
    printed = table(numbers)
    assert "refused 429" in printed and "ttft 200 ms" in printed


CHOICE = {
    "text": "ab cd",
    "logprobs": {
        "text_offset": [0, 2, 3],
        "top_logprobs": [{"ab": -0.1, "x": -4}, {" ": -0.1, "y": -3}, {"cd": -0.5, "ce": -0.5001}],
    },
}


@pytest.mark.parametrize(
    ("text", "verdict"), [("ab cd", "equal"), ("ab ce", "near-tie"), ("xb cd", "different"),
                          ("ab c", "near-tie"), ("", "different")]
)  # fmt: skip
def test_answers_against_solo_runs(text: str, verdict: str) -> None:
    assert load_tool.compare(text, CHOICE) == verdict


# ---------------------------------------------------------------------- a whole run


class Server:
    """Speaks enough of the protocol; `misbehave` says how, by model."""

    def __init__(self) -> None:
        self.loaded = {"a": "/adapters/a", "b": "/adapters/b"}
        self.misbehave: dict[str, str] = {}
        self.bodies: list[dict[str, Any]] = []
        self.num_open = 0
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        cards = [{"id": name, "root": path, "parent": "base"} for name, path in self.loaded.items()]
        return JSONResponse({"data": [{"id": "base", "root": "/m", "parent": None}, *cards]})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "process_resident_memory_bytes 1000\nlora_engine_process_resident_memory_bytes 500\n"
            f'vllm:num_requests_running{{model_name="base"}} {self.num_open}\n'
        )

    async def load(self, request: Request) -> Response:
        body = await request.json()
        self.loaded[body["lora_name"]] = body["lora_path"]
        return PlainTextResponse("Success")

    async def unload(self, request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer admin"
        del self.loaded[(await request.json())["lora_name"]]
        return PlainTextResponse("Success")

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        model = body["model"]
        if model != "base" and model not in self.loaded:
            return JSONResponse({"error": {"message": f"no {model}"}}, 404)
        pieces = [f"{model[0]}{i}" for i in range(body["max_tokens"])]
        if not body.get("stream"):
            offsets = [2 * i for i in range(len(pieces))]
            tops = [{piece: -0.1, "?": -3.0} for piece in pieces]
            found = {"text_offset": offsets, "top_logprobs": tops}
            return JSONResponse({"choices": [{"text": "".join(pieces), "logprobs": found}]})
        return StreamingResponse(self.events(pieces, self.misbehave.get(model, "")))

    async def events(self, pieces: list[str], fault: str) -> Any:
        self.num_open += 1
        try:
            for i, piece in enumerate(pieces):
                if i == 1 and fault == "error":
                    yield b'data: {"error": {"message": "engine died"}}\n\n'
                    return
                if i == 1 and fault == "early end":
                    return
                text = "wrong" if i == 1 and fault == "wrong" else piece
                chunk = {"choices": [{"index": 0, "text": text}]}
                yield b"data: %s\n\n" % json.dumps(chunk).encode()
                await asyncio.sleep(0)
            usage = {"choices": [], "usage": {"completion_tokens": len(pieces)}}
            yield b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(usage).encode()
        finally:
            self.num_open -= 1


def run(server: Server, capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str]:
    """The tool's status and what it printed."""

    async def both() -> int:
        config = uvicorn.Config(server.app, port=0, log_config=None, lifespan="off")
        own = uvicorn.Server(config)
        task = asyncio.create_task(own._serve())
        while not own.started:
            await asyncio.sleep(0.01)
        port = own.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        try:
            return await load_tool.load(url, load_tool.arguments(["--url", url, *given]))
        finally:
            own.should_exit = True
            await task

    return asyncio.run(both()), capsys.readouterr().out


SHORT = ("--seconds", "0.3", "--output-tokens", "3", "6", "--base-share", "0.3")


def test_a_closed_loop_with_churn_disconnects_and_solo_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server, report = Server(), tmp_path / "report.json"
    more = ["--admin-key", "admin", "--churn", "0.02", "--disconnect", "0.3", "--check"]
    status, printed = run(
        server, capsys, *SHORT, "--concurrency", "8", *more, "--json", str(report)
    )
    assert status == 0, printed
    numbers = json.loads(report.read_text())
    kinds = numbers["kinds"]
    assert kinds["completed"] > 5 and kinds["disconnected"] > 5
    assert set(kinds) <= {"completed", "disconnected", "refused 404"}
    assert numbers["check"]["equal"] == kinds["completed"] and not numbers["check"]["faults"]
    assert numbers["adapter_changes"]["unloaded"] == numbers["adapter_changes"]["loaded"] > 0
    assert server.loaded == {"a": "/adapters/a", "b": "/adapters/b"}, "none is left unloaded"
    assert numbers["rss_bytes"]["max"] == 1500
    streamed = [body for body in server.bodies if body.get("stream")]
    assert all(body["min_tokens"] == body["max_tokens"] for body in streamed)
    assert "against solo runs" in printed


def test_an_open_loop_comes_at_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    status, printed = run(server, capsys, *SHORT, "--rate", "200", "--goodput", "ttft:5000")
    assert status == 0, printed
    assert 20 <= len(server.bodies) <= 120
    assert "ttft 5000 ms" in printed


@pytest.mark.parametrize(
    ("fault", "kind"), [("error", "error in stream"), ("early end", "error stream ended early")]
)
def test_broken_streams_are_errors(
    fault: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    server.misbehave["base"] = fault
    status, printed = run(server, capsys, *SHORT, "--concurrency", "2")
    assert status == 1 and kind in printed and "completed" in printed


def test_a_wrong_answer_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    server.misbehave["base"] = "wrong"
    status, printed = run(server, capsys, *SHORT, "--concurrency", "2", "--check")
    assert status == 1 and "'different': " in printed and "b0wrong" in printed


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (["--url", "x"], "give --rate, --concurrency or both"),
        (["--url", "x", "--rate", "1", "--goodput", "speed:3"], "write ttft:, itl: or e2e:"),
    ):
        with pytest.raises(SystemExit):
            load_tool.arguments(given)
        assert message in capsys.readouterr().err
    options: argparse.Namespace = load_tool.arguments(
        ["--url", "x", "--rate", "1", "--goodput", "ttft:500", "itl:20"]
    )
    assert options.goodput == {"ttft": 0.5, "itl": 0.02}


# ---------------------------------------------------------------------- malformed requests


def test_the_fuzzer_draws_all_kinds_the_same_each_time() -> None:
    generator, again = Generator("m", 3), Generator("m", 3)
    cases = [generator.next() for _ in range(3000)]
    assert [again.next() for _ in range(200)] == cases[:200]
    kinds = Counter(case.kind for case in cases)
    assert len(kinds) == 21 and min(kinds.values()) > 20
    for case in cases:
        head, _, body = case.data.partition(b"\r\n\r\n")
        if case.sound:
            length = int(head.rpartition(b"content-length: ")[2])
            assert length == len(body), "sound HTTP says the body's true length"
