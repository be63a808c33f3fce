"""Callers that leave, at every phase of a request: everything is freed and others go on."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from front_support import BASE, Served, served_front
from recorder import Recorder, until

CHAT = [{"role": "user", "content": "the quick"}]
LONG = {"model": "rank1", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, recorder: Recorder) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("left")
    with served_front(folder, observer=recorder, resolve=True, max_requests=8) as made:
        yield made


@pytest.fixture
def ends(recorder: Recorder) -> list[tuple[str, str, int]]:
    """Ends of requests from now on."""
    recorder.ends.clear()
    recorder.answers.clear()
    return recorder.ends


class Caller:
    """A connection that can be dropped at any byte."""

    def __init__(self, server: Served) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._received = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def post(self, path: str, **body: Any) -> None:
        content = json.dumps(body).encode()
        self.send(head(path, len(content)) + content)

    def read_until(self, wanted: bytes) -> bytes:
        while wanted not in self._received:
            part = self._socket.recv(4096)
            assert part, self._received
            self._received += part
        return self._received

    def leave(self) -> None:
        self._socket.close()


def head(path: str, length: int) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), length)


def works(server: Served) -> bool:
    return server.complete().status_code == 200


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {**LONG, "prompt": [1, 267]}),
    "streamed completion": ("/v1/completions", {**LONG, "prompt": [1, 267], "stream": True}),
    "chat": ("/v1/chat/completions", {**LONG, "messages": CHAT}),
    "streamed chat": ("/v1/chat/completions", {**LONG, "messages": CHAT, "stream": True}),
    "samples": ("/v1/completions", {**LONG, "prompt": "a", "n": 3, "temperature": 1}),
    "batch": ("/v1/completions", {**LONG, "prompt": ["a", "b", "c"]}),
    "streamed batch": ("/v1/completions", {**LONG, "prompt": ["a", "b"], "n": 2, "stream": True}),
    "weights": ("/v1/completions", {**LONG, "model": BASE, "adapter": {"rank1": 1}, "prompt": "a"}),
}


@pytest.mark.parametrize("case", sorted(BODIES))
def test_leaving_before_the_first_token(
    server: Served, ends: list[tuple[str, str, int]], case: str
) -> None:
    path, body = BODIES[case]
    caller = Caller(server)
    with server.client.held():
        caller.post(path, **body)
        until(lambda: server.client.num_open > 0)
        caller.leave()
        until(lambda: server.client.num_open == 0)
    until(lambda: server.client.idle)
    assert ends == [("rank1", "abort", 0)] and works(server)


@pytest.mark.parametrize("case", sorted(name for name in BODIES if "stream" in name))
def test_leaving_in_the_middle_of_a_stream(
    server: Served, ends: list[tuple[str, str, int]], recorder: Recorder, case: str
) -> None:
    path, body = BODIES[case]
    caller = Caller(server)
    caller.post(path, **body)
    caller.read_until(b"\ndata: ")
    caller.leave()
    until(lambda: server.client.idle and bool(ends))
    [(adapter, reason, num_tokens)] = ends
    assert (adapter, reason) == ("rank1", "abort") and 0 < num_tokens < 1600
    assert works(server)


@pytest.mark.parametrize("case", sorted(name for name in BODIES if "stream" not in name))
def test_leaving_while_an_answer_is_computed(
    server: Served, ends: list[tuple[str, str, int]], recorder: Recorder, case: str
) -> None:
    path, body = BODIES[case]
    first = recorder.num_first
    caller = Caller(server)
    caller.post(path, **body)
    until(lambda: recorder.num_first > first)
    caller.leave()
    until(lambda: server.client.idle and bool(ends))
    [(_, reason, num_tokens)] = ends
    assert reason == "abort" and 0 < num_tokens < 1200 and works(server)


def test_leaving_in_the_middle_of_the_body(
    server: Served, ends: list[tuple[str, str, int]], recorder: Recorder
) -> None:
    caller = Caller(server)
    caller.send(head("/v1/completions", 100) + b'{"model":')
    caller.leave()
    until(lambda: ("POST", "/v1/completions", 499) in recorder.answers)
    assert ends == [] and server.client.idle and works(server)


def test_leaving_while_an_adapter_is_loaded_lets_the_load_go_on(
    server: Served, ends: list[tuple[str, str, int]], recorder: Recorder
) -> None:
    client = server.client
    client.load_delay_s = 0.2
    caller = Caller(server)
    caller.post("/v1/completions", model="late", prompt="a")
    until(lambda: "late" in client.loads)
    caller.leave()
    until(lambda: ("POST", "/v1/completions", 499) in recorder.answers)
    assert not any(info.name == "late" for info in client.adapters)
    until(lambda: any(info.name == "late" for info in client.adapters))
    client.load_delay_s = 0.0
    assert ends == [] and server.complete(model="late").status_code == 200
    assert client.loads == ["late"]


def test_places_of_those_who_left_are_free_again(
    server: Served, ends: list[tuple[str, str, int]]
) -> None:
    """8 samples may be open; 8 callers come and go, several times."""
    for _ in range(3):
        callers = [Caller(server) for _ in range(8)]
        with server.client.held():
            for caller in callers:
                caller.post("/v1/completions", **LONG, prompt="a")
            until(lambda: server.client.num_open == 8)
            assert server.complete().status_code == 429
            for caller in callers:
                caller.leave()
            until(lambda: server.client.num_open == 0)
        assert works(server)
    assert [reason for _, reason, _ in ends].count("abort") == 24
