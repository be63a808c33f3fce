"""Front end and engine process together: keys stay out of all output, callers who leave are freed
in the engine, the death of the process reaches callers as documented.
"""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import tensors_body
from front_support import BASE, DATA
from openai_server import resolving_server
from recorder import until
from server_support import Server, start_server

USER_KEY, ADMIN_KEY, WRONG_KEY = "user-key-51", "admin-key-77", "wrong-key-99"
NO_TENSORS = b'{"__metadata__":{"adapter_config":"{\\"r\\":1}"}}'
LONG = {"model": BASE, "prompt": "a", "max_tokens": 500, "ignore_eos": True}
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def server() -> Server:
    return resolving_server()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys, which tests may break."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "user").write_text(f"{USER_KEY}\n")
    (folder / "admin").write_text(f"\n{ADMIN_KEY}\n")
    with start_server(
        folder,
        f"server.api_keys_file={folder}/user",
        f"server.admin_keys_file={folder}/admin",
        "server.access_log=true",
        "log_level=trace",
    ) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def gauges(server: Server) -> list[float]:
    """What `/metrics` says of requests in the engine."""
    text = httpx.get(f"{server.url}/metrics").text
    found = [re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in GAUGES]
    return [float(match[1]) for match in found if match]


class Caller:
    """A connection that is dropped without a word."""

    def __init__(self, server: Server, path: str, **body: Any) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        content = json.dumps(body).encode()
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._socket.sendall(head % (path.encode(), len(content)) + content)

    def read_some(self) -> None:
        assert self._socket.recv(100)

    def leave(self) -> None:
        self._socket.close()


# ---------------------------------------------------------------------- callers who leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_callers", [1, 30])
def test_the_engine_is_free_of_those_who_left(
    server: Server, stream: bool, num_callers: int
) -> None:
    """30 are more than the engine runs at once: some leave from the waiting line."""
    assert gauges(server) == [0, 0, 0]
    callers = [Caller(server, "/v1/completions", **LONG, stream=stream) for _ in range(num_callers)]
    until(lambda: gauges(server)[:2] == [min(16, num_callers), max(0, num_callers - 16)])
    if stream:
        callers[0].read_some()
    for caller in callers:
        caller.leave()
    until(lambda: gauges(server) == [0, 0, 0])
    short = LONG | {"max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=short).status_code == 200


def test_leaving_while_a_grammar_is_compiled(server: Server) -> None:
    hard = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": hard}}
    before = server.stats().generated_tokens_total
    for _ in range(4):
        Caller(server, "/v1/completions", **LONG, response_format=schema).leave()
    until(lambda: gauges(server) == [0, 0, 0])
    short = LONG | {"max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=short).status_code == 200
    until(lambda: gauges(server) == [0, 0, 0])
    assert server.stats().generated_tokens_total - before < 100


# ---------------------------------------------------------------------- adapters from tensors


def test_an_adapter_from_tensors_answers_as_the_one_from_its_directory(server: Server) -> None:
    body = tensors_body(DATA / "cases" / "c16_rank_1")
    url = f"{server.url}/v1/load_lora_adapter_from_tensors?lora_name=sent"
    done = httpx.post(url, content=body)
    assert done.text == "Success: LoRA adapter 'sent' added successfully."
    assert httpx.post(url, content=body).status_code == 400
    assert httpx.post(f"{url}&replace=true", content=body).status_code == 200
    texts = []
    for model in ("sent", "rank1", BASE):
        asked = {"model": model, "prompt": [1, 267, 334], "max_tokens": 8}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked).json()
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1] != texts[2]
    gone = {"lora_name": "sent"}
    assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json=gone).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 32,
        len(NO_TENSORS).to_bytes(8, "little") + NO_TENSORS,
        tensors_body(DATA / "cases" / "c16_rank_1")[:-40],
    ],
    ids=["empty", "noise", "no tensor", "truncated"],
)
def test_tensors_that_are_none_are_refused(server: Server, body: bytes) -> None:
    url = f"{server.url}/v1/load_lora_adapter_from_tensors?lora_name=bad"
    answer = httpx.post(url, content=body)
    assert answer.status_code == 400, answer.text
    assert "bad" not in [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]


# ---------------------------------------------------------------------- keys, death, shutdown


def test_keys_are_nowhere_in_what_a_server_writes(keyed: Server) -> None:
    url = keyed.url
    with httpx.Client(base_url=url) as http:
        for key, models, load in (
            (WRONG_KEY, 401, 401),
            (USER_KEY, 200, 403),
            (ADMIN_KEY, 200, 400),
        ):
            headers = bearer(key)
            assert http.get("/v1/models", headers=headers).status_code == models
            answers = [
                http.post("/v1/load_lora_adapter", headers=headers, content=b"{"),
                http.post("/v1/completions", headers=headers, json=LONG | {"max_tokens": 2}),
                http.post("/v1/completions", headers=headers, content=b"\xff"),
                http.get(f"/nowhere?key={key}", headers=headers),
                http.get("/v1/stats", headers=headers),
                http.get("/metrics", headers=headers),
            ]
            assert answers[0].status_code == load
            assert not any(key in answer.text for answer in answers)
    until(lambda: "GET /metrics 200" in keyed.log)
    for key in (USER_KEY, ADMIN_KEY, WRONG_KEY):
        assert key not in keyed.log
        assert key not in Path(f"/proc/{keyed.process.pid}/cmdline").read_text()


def test_the_death_of_the_engine_reaches_everyone_and_it_comes_back(keyed: Server) -> None:
    headers = bearer(ADMIN_KEY)
    stats = httpx.get(f"{keyed.url}/v1/stats", headers=headers).json()

    async def ask(http: httpx.AsyncClient, stream: bool) -> httpx.Response:
        return await http.post("/v1/completions", json=LONG | {"n": 2, "stream": stream})

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=keyed.url, headers=headers, timeout=20) as http:
            asked = [asyncio.create_task(ask(http, stream)) for stream in (False, True)]
            while gauges(keyed)[0] < 4:
                await asyncio.sleep(0.005)
            os.kill(stats["info"]["pid"], signal.SIGKILL)
            return await asyncio.gather(*asked)

    whole, streamed = asyncio.run(run())
    assert whole.status_code == 503 and int(whole.headers["retry-after"]) > 0
    *_, last = streamed.text.removesuffix("\n\n").split("\n\n")
    for error in (whole.json()["error"], json.loads(last.removeprefix("data: "))["error"]):
        assert "SIGKILL" in error["message"] and error["code"] == "unavailable"
    health = httpx.get(f"{keyed.url}/health")
    assert health.status_code == 503 and health.json()["error"]["code"] == "unavailable"
    until(lambda: httpx.get(f"{keyed.url}/ready").status_code == 200, 60)
    answer = httpx.post(
        f"{keyed.url}/v1/completions",
        headers=headers,
        json={"model": "rank1", "prompt": "a", "max_tokens": 2},
    )
    assert answer.status_code == 200, answer.text


def test_a_stream_ends_whole_while_the_server_shuts_down(keyed: Server) -> None:
    headers = bearer(USER_KEY)
    with httpx.stream(
        "POST", f"{keyed.url}/v1/completions", headers=headers, json=LONG | {"stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        keyed.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{keyed.url}/ready").status_code == 503)
        refused = httpx.post(f"{keyed.url}/v1/completions", headers=headers, json=LONG)
        assert refused.status_code == 503 and "shutting down" in refused.text
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{keyed.url}/health").status_code == 200
        rest = list(lines)
    assert "data: [DONE]" in rest and not any("error" in line for line in rest)
    assert keyed.process.wait(30) == 0
