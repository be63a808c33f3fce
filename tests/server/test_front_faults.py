"""Faults and limits: what fails before the first token is a status, later an event; nothing is
told that is not the caller's business.
"""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_support import BASE, DATA, Served, served_front
from loguru import logger
from recorder import Recorder, until

from engine.errors import AdapterError, EngineDiedError, RequestError, SlowReaderError
from engine.server.client import EngineState
from engine.server.limits import Watchdog
from engine.server.messages import EngineStats

SECRET = "/secret/place"


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, recorder: Recorder) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("faults")
    with served_front(
        folder,
        observer=recorder,
        resolve=True,
        max_requests=6,
        max_prompt_tokens=20,
        request_timeout_s=0.5,
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def healed(server: Served, recorder: Recorder) -> Iterator[None]:
    recorder.ends.clear()
    yield
    client = server.client
    client.fault, client.num_before, client.state = None, 0, EngineState.ready
    until(lambda: client.idle)


def events(text: str) -> list[Any]:
    """The data of server-sent events; the end mark as text."""
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


# ---------------------------------------------------------------------- faults of the engine

FAULTS: dict[str, tuple[Exception, int, str, str]] = {
    "refused": (RequestError("n: got 9, allowed is 8"), 400, "n: got 9, allowed is 8", "error"),
    "adapter gone": (
        AdapterError("adapter 'x' is not loaded; loaded adapters: a"),
        404,
        "'x' is not loaded",
        "error",
    ),
    "died": (EngineDiedError("the engine process ended with code -9"), 503, "code -9", "error"),
    "slow": (SlowReaderError("1024 events behind"), 408, "1024 events behind", "abort"),
    "bug": (ValueError(f"no key in {SECRET}"), 500, "request id", "error"),
    "key error": (KeyError(SECRET), 500, "request id", "error"),
    "timeout of its own": (TimeoutError(SECRET), 500, "request id", "error"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", sorted(FAULTS))
def test_faults_before_the_first_token_are_statuses(
    server: Served, recorder: Recorder, case: str, stream: bool
) -> None:
    fault, status, words, reason = FAULTS[case]
    server.client.fault = fault
    answer = server.complete(stream=stream)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert words in answer.json()["error"]["message"] and SECRET not in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)
    assert recorder.ends == [("", reason, 0)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("case", sorted(FAULTS))
def test_faults_in_a_stream_are_its_last_event(
    server: Served, recorder: Recorder, case: str, path: str
) -> None:
    fault, _, words, reason = FAULTS[case]
    server.client.fault, server.client.num_before = fault, 3
    body = {"model": BASE, "max_tokens": 9, "stream": True}
    body |= (
        {"prompt": [1, 267]}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200
    *chunks, last = events(answer.text)
    assert chunks and all("choices" in chunk for chunk in chunks)
    assert set(last) == {"error"} and words in last["error"]["message"]
    assert SECRET not in answer.text
    assert recorder.ends == [("", reason, 3)]


def test_one_fault_ends_a_whole_batch(server: Served, recorder: Recorder) -> None:
    server.client.fault, server.client.num_before = EngineDiedError("gone"), 2
    answer = server.complete(prompt=["a", "b", "c"], max_tokens=9)
    assert answer.status_code == 503
    until(lambda: server.client.idle)
    assert [reason for _, reason, _ in recorder.ends] == ["error"]


def test_a_fault_of_one_sample_names_no_internals(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr(server.client.engine.runner, "run", broken)
    answer = server.complete(prompt=["a", "b"])
    assert answer.status_code == 500 and SECRET not in answer.text
    streamed = server.complete(stream=True)
    assert streamed.status_code == 500 and SECRET not in streamed.text


def test_a_request_that_rules_out_all_tokens_is_the_callers_error(server: Served) -> None:
    """The grammar leaves one token, which logit_bias takes away."""
    [token_id] = server.client.engine.tokenizer.encode("a")
    asked = {"regex": "a", "logit_bias": {str(token_id): -100}, "bad_words": ["a"]}
    answer = server.complete(prompt="a", **asked)
    assert answer.status_code == 400, answer.text
    assert "no token is left to choose from" in answer.json()["error"]["message"]


def test_internal_faults_are_logged_under_the_request_id(server: Served) -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="ERROR", diagnose=False)
    server.client.fault = ValueError(SECRET)
    answer = server.http.post(
        "/v1/completions",
        json={"model": BASE, "prompt": "a"},
        headers={"x-request-id": "find-me"},
    )
    logger.remove(sink)
    assert "find-me" in answer.json()["error"]["message"]
    assert any("find-me" in line and SECRET in line for line in lines)


# ---------------------------------------------------------------------- states


@pytest.mark.parametrize("state", sorted(set(EngineState) - {EngineState.ready}, key=str))
def test_only_a_ready_engine_takes_requests(server: Served, state: EngineState) -> None:
    server.client.state = state
    for path, body in (
        ("/v1/completions", {"model": BASE, "prompt": "a"}),
        ("/v1/chat/completions", {"model": BASE, "messages": []}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "lazy"}),
        ("/v1/unload_lora_adapter", {"lora_name": "rank1"}),
    ):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    ready, health = server.http.get("/ready"), server.http.get("/health")
    assert ready.status_code == 503 and ready.json()["error"]["message"]
    assert health.status_code == (200 if state is EngineState.draining else 503)
    assert server.http.get("/v1/models").json()["data"][0]["ready"] is False


def test_a_running_stream_goes_on_while_draining(server: Served) -> None:
    with server.http.stream(
        "POST", "/v1/completions", json={"model": BASE, "prompt": "a", "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.client.state = EngineState.draining
        assert "data: [DONE]" in list(lines)


def test_health_is_red_when_work_makes_no_progress() -> None:
    busy = EngineStats(1, 0, 9, 1, 1, 0, [], [], 1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)

    class Client:
        stats = busy

    now = [0.0]
    client = Client()
    watchdog = Watchdog(client, lambda: now[0])  # type: ignore[arg-type]
    assert watchdog.stuck_for_s() == 0
    now[0] = 50.0
    assert watchdog.stuck_for_s() == 50
    client.stats = EngineStats(1, 0, 9, 2, 1, 0, [], [], 2, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    assert watchdog.stuck_for_s() == 0
    now[0] = 90.0
    assert watchdog.stuck_for_s() == 40
    client.stats = EngineStats(0, 0, 9, 0, 1, 0, [], [], 2, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    assert watchdog.stuck_for_s() == 0
    now[0] = 900.0
    assert watchdog.stuck_for_s() == 0  # idle engines are well


def test_a_stuck_engine_turns_health_red(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "stuck_for_s", lambda self: 61.0)
    answer = server.http.get("/health")
    assert answer.status_code == 503 and "61 s" in answer.text


# ---------------------------------------------------------------------- limits


def test_too_many_at_once_are_told_to_come_back(server: Served, recorder: Recorder) -> None:
    async def ask(http: httpx.AsyncClient, stream: bool) -> int:
        body = {"model": BASE, "prompt": "a", "n": 2, "temperature": 1, "stream": stream}
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        return answer.status_code

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as http:
            return await asyncio.gather(*(ask(http, bool(i % 2)) for i in range(12)))

    with server.client.held():
        statuses = asyncio.run(run())
    assert sorted(set(statuses)) == [429, 504]  # held ones end by their time
    assert statuses.count(504) == 3


def test_a_batch_that_could_never_run_is_refused_for_good(server: Served) -> None:
    answer = server.complete(prompt=["a"] * 7)
    assert answer.status_code == 400 and "server.max_requests" in answer.text


def test_long_prompts_are_refused_with_numbers(server: Served) -> None:
    answer = server.complete(prompt=list(range(3, 24)))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "21 tokens, allowed are 20" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert server.complete(prompt=list(range(3, 23))).status_code == 200


@pytest.mark.parametrize("num_before", [0, 3])
def test_requests_end_when_their_time_is_up(
    server: Served, recorder: Recorder, num_before: int
) -> None:
    """Held after `num_before` tokens: a status, or an event in a stream."""
    body = {"model": BASE, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    if num_before == 0:
        with server.client.held():
            plain = server.complete(max_tokens=400)
            assert plain.status_code == 504 and plain.json()["error"]["code"] == "timeout"
            assert server.complete(stream=True).status_code == 504
        return
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        parts = answer.iter_text()
        text = next(parts)
        with server.client.held():
            text += "".join(parts)
    *_, last = events(text)
    assert last["error"]["code"] == "timeout" and "0.5 s" in last["error"]["message"]
    assert recorder.ends[-1][1] == "abort"


def test_bodies_that_do_not_come_are_given_up(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_reader_that_reads_nothing_is_cut_off(server: Served, recorder: Recorder) -> None:
    """The socket's buffers fill, sending waits, the time runs out, the connection is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "model": BASE,
            "prompt": "a",
            "max_tokens": 500,
            "n": 6,
            "temperature": 1,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
        }
    ).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        until(lambda: any(reason == "abort" for _, reason, _ in recorder.ends))
    assert server.complete().status_code == 200


# ---------------------------------------------------------------------- names


def test_one_load_for_many_that_ask_at_once(server: Served) -> None:
    client = server.client
    client.load_delay_s = 0.05

    async def run() -> set[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as http:
            body = {"model": "lazy", "prompt": "a", "max_tokens": 1}
            asked = (http.post("/v1/completions", json=body) for _ in range(6))
            return {answer.status_code for answer in await asyncio.gather(*asked)}

    assert asyncio.run(run()) == {200}
    assert client.loads == ["lazy"]
    client.load_delay_s = 0.0


def test_changes_of_one_name_come_one_after_the_other(server: Served) -> None:
    client = server.client
    client.load_delay_s = 0.05

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as http:
            load = {"lora_name": "twin", "lora_path": "late"}
            asked = [
                http.post("/v1/load_lora_adapter", json=load),
                http.post("/v1/load_lora_adapter", json=load),
            ]
            return sorted(answer.status_code for answer in await asyncio.gather(*asked))

    assert asyncio.run(run()) == [200, 400]
    assert client.loads.count("twin") == 1
    client.load_delay_s = 0.0
    body = {"lora_name": "twin"}
    assert server.http.post("/v1/unload_lora_adapter", json=body).status_code == 200


def test_an_adapter_whose_directory_vanishes_serves_on(server: Served, tmp_path: Path) -> None:
    gone = server.root / "gone"
    gone.mkdir()
    for file in (DATA / "cases" / "c16_rank_1" / "adapter").iterdir():
        (gone / file.name).write_bytes(file.read_bytes())
    assert server.load("gone", "gone").status_code == 200
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    assert server.complete(model="gone").status_code == 200
    answer = server.load("gone", "gone", replace=True)
    assert answer.status_code == 404 and server.complete(model="gone").status_code == 200


def test_priorities_reach_the_engine(server: Served) -> None:
    given = [-(2**63) + 1, -3, 0, 7, 2**63 - 1]
    for priority in given:
        assert server.complete(priority=priority).status_code == 200
    assert server.complete().status_code == 200
    assert server.client.priorities[-6:] == [*given, 0]


# ---------------------------------------------------------------------- what observers are told


def test_observers_see_tokens_and_ends(server: Served, recorder: Recorder) -> None:
    first, later = recorder.num_first, recorder.num_later
    asked = server.complete(
        model=f"{BASE}:rank1", prompt=["a", "b"], n=2, temperature=1, ignore_eos=True, max_tokens=5
    )
    assert asked.status_code == 200
    until(lambda: recorder.ends == [("rank1", "length", 20)])
    assert recorder.num_first == first + 1 and recorder.num_later == later + 16
    record = recorder.started_requests[-1]
    assert (record.num_samples, record.model, record.route) == (4, BASE, "/v1/completions")
    assert record.request_id == asked.headers["x-request-id"]
    until(lambda: recorder.answers[-1] == ("POST", "/v1/completions", 200))
    server.http.get("/v1/models/rank1")
    until(lambda: recorder.answers[-1] == ("GET", "/v1/models/{model:path}", 200))
    server.http.get("/nowhere")
    until(lambda: recorder.answers[-1] == ("GET", "", 404))
