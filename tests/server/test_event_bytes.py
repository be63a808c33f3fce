"""The bytes of streams, read raw: valid server-sent events, whatever the model says."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from front_support import BASE, Served, served_front

HOSTILE = 'q"uo\\te\u2028</script>'
CHAT = [{"role": "user", "content": "the quick"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_front(tmp_path_factory.mktemp("bytes")) as made:
        yield made


def post(server: Served, path: str, **body: Any) -> tuple[dict[str, str], bytes]:
    asked = {"model": BASE, "max_tokens": 12, "stream": True} | body
    answer = server.http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    return dict(answer.headers), answer.content


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": [1, 267]}),
    "newlines": ("/v1/completions", {"prompt": "a", "regex": "(\n|\r|\r\n|\u2028){9}"}),
    "quotes": ("/v1/completions", {"prompt": "a", "regex": '["\\\\]{9}'}),
    "wide characters": ("/v1/completions", {"prompt": "a", "regex": "[\u00e9\u4e2d\U0001f600]{3}"}),
    "logprobs": ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True}),
    "batch": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "temperature": 1}),
    "usage": ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}),
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "chat logprobs": ("/v1/chat/completions", {"messages": CHAT, "logprobs": True}),
    "chat usage": (
        "/v1/chat/completions",
        {"messages": CHAT, "stream_options": {"include_usage": True}},
    ),
}


@pytest.mark.parametrize("case", sorted(ASKED))
def test_streams_are_valid_events(server: Served, case: str) -> None:
    path, body = ASKED[case]
    headers, raw = post(server, path, **body)
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers
    assert re.fullmatch(rb"(data: [^\r\n]+\n\n)+", raw)
    *blocks, last = raw.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    ends: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in ends, "nothing comes after a choice's end"
            assert {"index", "logprobs", "finish_reason"} < set(choice)
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice["finish_reason"]
    assert set(ends) == set(range(4 if case == "batch" else 1))
    wants_usage = "stream_options" in body
    assert all(("usage" in chunk) == wants_usage for chunk in chunks)
    assert [chunk for chunk in chunks if chunk.get("usage")] == (chunks[-1:] * wants_usage)


def test_texts_of_a_stream_are_those_of_the_whole_answer(server: Served) -> None:
    for case in ("newlines", "quotes", "wide characters"):
        path, body = ASKED[case]
        _, raw = post(server, path, **body, n=2, temperature=1, seed=3)
        texts = ["", ""]
        for block in raw.decode().removesuffix("\n\n").split("\n\n")[:-1]:
            [choice] = json.loads(block.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["text"]
        whole = server.complete(**body, n=2, temperature=1, seed=3, max_tokens=12).json()
        assert texts == [choice["text"] for choice in whole["choices"]]


def test_hostile_names_are_escaped(server: Served) -> None:
    assert server.load(f"a{HOSTILE}", "lazy").status_code == 400  # a backslash
    name = HOSTILE.replace("\\", "").replace("\u2028", "\u00e9").replace("/", "")
    assert server.load(name, "lazy").status_code == 200
    _, raw = post(server, "/v1/completions", prompt="a", **{"model": name})
    assert re.fullmatch(rb"(data: [^\r\n]+\n\n)+", raw)
    first = raw.decode().split("\n\n")[0].removeprefix("data: ")
    assert json.loads(first)["model"] == name


def test_heads_have_no_body(server: Served) -> None:
    for path in ("/health", "/v1/models", "/openapi.json"):
        answer = server.http.head(path)
        assert answer.status_code == 200 and answer.content == b""


def test_a_connection_serves_one_request_after_the_other(server: Served) -> None:
    with server.http.stream(
        "POST", "/v1/completions", json={"model": BASE, "prompt": "a", "stream": True}
    ) as answer:
        local = answer.extensions["network_stream"].get_extra_info("client_addr")
        answer.read()
    for body in ({"model": BASE}, {"model": BASE, "prompt": "a"}):
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.extensions["network_stream"].get_extra_info("client_addr") == local
            answer.read()
