"""Bodies and headers that no client sends by accident: each is refused as a caller's error, never
answered with 500.
"""

import socket
from collections.abc import Iterator

import pytest
from front_support import Served, served_front
from loguru import logger


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_front(
        tmp_path_factory.mktemp("open"), max_body_bytes=16384, access_log=True
    ) as server:
        yield server


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="TRACE", diagnose=False)
    yield lines
    logger.remove(sink)


BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "truncated": (b'{"model": "tiny", "prompt": "a', 400),
    "not JSON": (b"model=tiny&prompt=a", 400),
    "array": (b'["tiny"]', 400),
    "null": (b"null", 400),
    "bad UTF-8": (b'{"model":"tiny","prompt":"\xff\xfe"}', 400),
    "bad UTF-8 in what is ignored": (b'{"model":"tiny","prompt":"a","user":"\xff"}', 400),
    "bad UTF-8 as a key": (b'{"\xff":1}', 400),
    "UTF-16": ('{"model":"tiny"}'.encode("utf-16"), 400),
    "lone surrogate": (b'{"model":"tiny","prompt":"\\ud800"}', 400),
    "NaN": (b'{"model":"tiny","prompt":"a","temperature":NaN}', 400),
    "infinity": (b'{"model":"tiny","prompt":"a","temperature":Infinity}', 400),
    "1e999": (b'{"model":"tiny","prompt":"a","temperature":1e999}', 400),
    "huge int": (b'{"model":"tiny","prompt":"a","max_tokens":' + b"9" * 400 + b"}", 400),
    "huge seed": (b'{"model":"tiny","prompt":"a","seed":' + b"9" * 30 + b"}", 400),
    "huge token id": (b'{"model":"tiny","prompt":[' + b"9" * 30 + b"]}", 400),
    "huge priority": (b'{"model":"tiny","prompt":"a","priority":' + b"9" * 30 + b"}", 400),
    "huge logit_bias key": (
        b'{"model":"tiny","prompt":"a","logit_bias":{"' + b"9" * 30 + b'":1}}',
        400,
    ),
    "fraction": (b'{"model":"tiny","prompt":"a","max_tokens":1.5}', 400),
    "true as int": (b'{"model":"tiny","prompt":"a","max_tokens":true}', 400),
    "true as id": (b'{"model":"tiny","prompt":[true]}', 400),
    "nested lists": (b'{"model":"tiny","prompt":[[[1]]]}', 400),
    "prompt as object": (b'{"model":"tiny","prompt":{"a":1}}', 400),
    "model as list": (b'{"model":["tiny"],"prompt":"a"}', 400),
    "model of NUL": (b'{"model":"\\u0000","prompt":"a"}', 404),
    "trailing": (b'{"model":"tiny","prompt":"a"} x', 400),
    "control characters": (b'{"model":"tiny","prompt":"a\x01"}', 400),
    "deep in what is ignored": (
        b'{"model":"tiny","prompt":"a","user":' + b"[" * 3000 + b"]" * 3000 + b"}",
        400,
    ),
    "too large": (b'{"model":"tiny","prompt":"' + b"a" * 17000 + b'"}', 413),
}


@pytest.mark.parametrize("case", sorted(BODIES))
def test_bad_bodies(open_server: Served, case: str) -> None:
    body, status = BODIES[case]
    answer = open_server.http.post("/v1/completions", content=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize",
                                   "/detokenize", "/v1/load_lora_adapter",
                                   "/v1/unload_lora_adapter"])  # fmt: skip
@pytest.mark.parametrize("body", [b"[" * 2000, b'{"a":' * 700 + b"1" + b"}" * 700, b"{}", b"\xff"])
def test_every_route_refuses_nonsense(open_server: Served, route: str, body: bytes) -> None:
    answer = open_server.http.post(route, content=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_deep_values_of_every_field_are_refused(open_server: Served) -> None:
    for depth in (200, 700, 950, 3000):
        deep = b"[" * depth + b"]" * depth
        for field in (b"tools", b"chat_template_kwargs", b"tool_choice", b"user"):
            inner = b'{"x":' + deep + b"}"
            inner = b"[" + inner + b"]" if field == b"tools" else inner
            body = (
                b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"a"}],"'
                + field + b'":' + inner + b"}"
            )  # fmt: skip
            answer = open_server.http.post("/v1/chat/completions", content=body)
            assert answer.status_code in (200, 400), (depth, field, answer.text)


def raw(url: str, request: bytes) -> bytes:
    """Everything that the server sends to a request written by hand, until it closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def chunked(parts: list[bytes]) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_the_body_limit_holds_without_a_length(open_server: Served) -> None:
    answer = raw(open_server.url, chunked([b'{"model":"tiny","prompt":"'] + [b"a" * 1000] * 50))
    assert answer.startswith(b"HTTP/1.1 413 ") and b"server.max_body_bytes" in answer


def test_a_declared_length_is_refused_before_it_is_sent(open_server: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
    assert raw(open_server.url, head).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "given",
    ["a b", "a\tb", "x" * 129, "<script>", "caf\xe9", "a;b", "a%0d%0aset-cookie: x", ""],
)
def test_request_ids_that_are_not_plain_are_replaced(open_server: Served, given: str) -> None:
    headers = [("x-request-id", given.encode("latin-1"))]
    answer = open_server.http.get("/health", headers=headers)  # type: ignore[arg-type]
    assert answer.headers["x-request-id"] != given
    assert answer.headers["x-request-id"].isalnum()


def test_plain_request_ids_come_back(open_server: Served) -> None:
    headers = {"x-request-id": "a-b_c.d:9"}
    assert open_server.http.get("/health", headers=headers).headers["x-request-id"] == "a-b_c.d:9"


@pytest.mark.parametrize("path", ["/%0d%0aset-cookie:%20x", "/v1/models/a%0d%0ab", "/%1b[31m"])
def test_log_lines_and_headers_cannot_be_forged(
    open_server: Served, logged: list[str], path: str
) -> None:
    answer = open_server.http.get(path)
    assert answer.status_code == 404 and "set-cookie" not in answer.headers
    access = [line for line in logged if "GET /" in line]
    assert len(access) == 1 and access[0].count("\n") == 1 and "\x1b" not in access[0]


TENSORS: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01",
    "no header": (0).to_bytes(8, "little"),
    "header beyond the end": (1 << 40).to_bytes(8, "little") + b"{}",
    "header of all bits": b"\xff" * 16,
    "header that is no JSON": (4).to_bytes(8, "little") + b"\xff\xfe{}",
    "no metadata": (2).to_bytes(8, "little") + b"{}",
    "config that is no JSON": b'{"__metadata__":{"adapter_config":"["}}',
    "config that is a list": b'{"__metadata__":{"adapter_config":"[]"}}',
    "deep config": b'{"__metadata__":{"adapter_config":"' + b"[" * 9000 + b'"}}',
    "no tensors": b'{"__metadata__":{"adapter_config":"{}"}}',
    "tensors beyond the end": b'{"__metadata__":{"adapter_config":"{}"},"a":{"dtype":"F32",'
    b'"shape":[9],"data_offsets":[0,36]}}',
}


@pytest.mark.parametrize("case", sorted(TENSORS))
def test_bad_tensors(open_server: Served, case: str) -> None:
    body = TENSORS[case]
    if body.startswith(b"{"):
        body = len(body).to_bytes(8, "little") + body
    answer = open_server.http.post(
        "/v1/load_lora_adapter_from_tensors?lora_name=mine", content=body
    )
    assert answer.status_code == 400, answer.text
    assert not any(info.name == "mine" for info in open_server.client.adapters)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?lora_name=",
        "?lora_name=a&replace=maybe",
        "?lora_name=a&path=/etc",
        "?lora_name=%00",
        "?name=a",
    ],
)
def test_bad_queries(open_server: Served, query: str) -> None:
    url = f"/v1/load_lora_adapter_from_tensors{query}"
    assert open_server.http.post(url, content=b"").status_code == 400
