"""Malformed HTTP requests as raw bytes, drawn from a seed: bodies that are wrong inside sound HTTP,
and HTTP that is wrong itself. Sends nothing.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the sea", "max_tokens": 2, "temperature": 0, "seed": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "stream": False},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere", "pinned": False},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/load_lora_adapter_from_tensors?lora_name=x": {},
    "/tokenize": {"prompt": "the sea", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
EXTRA = {
    "n": 2, "stop": ["a"], "logprobs": 1, "top_p": 0.5, "logit_bias": {"5": 1.0}, "stream": True,
    "response_format": {"type": "json_object"}, "adapter": {"a000": 0.5}, "priority": 1,
    "stream_options": {"include_usage": True}, "tools": [], "regex": "a+", "echo": True,
}  # fmt: skip
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, -1e308, 10**40, 1 << 63, "", "\0", "\ud800", "x" * 5000, [], {},
    [[]], [None], {"": None}, [0] * 3000, {"a": {"a": {"a": 1}}}, "../../etc/passwd", "file:///x",
    [1, "a"], "9" * 400, [[1, 2], "x"],
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`sound`: the HTTP itself is right, so that an answer must come."""

    kind: str
    data: bytes
    sound: bool


class Generator:
    """Draws cases for a server whose base model is `model`."""

    def __init__(self, model: str, seed: int) -> None:
        self._draw = random.Random(seed)
        self._model = model
        self._bodies: list[tuple[str, Callable[[bytes], bytes]]] = [
            ("truncated JSON", self._truncated),
            ("flipped bytes", self._flipped),
            ("bad UTF-8", self._bad_utf8),
            ("NUL and controls", self._controls),
            ("deep nesting", self._nested),
            ("huge numbers", self._huge_number),
            ("no JSON", lambda body: self._draw.randbytes(self._draw.randrange(300))),
            ("trailing garbage", lambda body: body + self._draw.randbytes(8)),
            ("byte order mark", lambda body: body.decode().encode("utf-16")),
            ("repeated keys", lambda body: body[:-1] + b"," + body[1:]),
        ]
        self._frames: list[tuple[str, Callable[[str, bytes], bytes]]] = [
            ("length too long", self._length_too_long),
            ("length too short", lambda path, body: _request(path, body, length=len(body) // 2)),
            ("length nonsense", self._length_nonsense),
            ("two lengths", self._two_lengths),
            ("length and chunked", self._length_and_chunked),
            ("chunked nonsense", self._chunked_nonsense),
            ("chunked cut off", self._chunked_cut_off),
            ("request line", self._request_line),
            ("headers", self._headers),
            ("pipelined garbage", lambda p, b: _request(p, b) + self._draw.randbytes(64)),
        ]

    def next(self) -> Case:
        path = self._draw.choice(list(VALID))
        valid = {"model": self._model, **VALID[path]}
        choice = self._draw.random()
        if choice < 0.4:
            return Case("wrong types", _request(path, self._wrong_types(valid)), True)
        body = json.dumps(valid).encode()
        if choice < 0.75:
            kind, spoil = self._draw.choice(self._bodies)
            return Case(kind, _request(path, spoil(body)), True)
        kind, frame = self._draw.choice(self._frames)
        return Case(kind, frame(path, body), False)

    # ------------------------------------------------------------------ bodies

    def _wrong_types(self, valid: dict[str, Any]) -> bytes:
        """One to three fields get values that they are not made for, some new ones among them."""
        body = dict(valid)
        for name in self._draw.sample([*body, *EXTRA], self._draw.randint(1, 3)):
            if name in EXTRA and self._draw.random() < 0.3:
                body[name] = EXTRA[name]
            else:
                body[name] = self._draw.choice(ODD_VALUES)
        return json.dumps(body).encode()

    def _truncated(self, body: bytes) -> bytes:
        return body[: self._draw.randrange(len(body))]

    def _flipped(self, body: bytes) -> bytes:
        spoilt = bytearray(body)
        for _ in range(self._draw.randint(1, 6)):
            spoilt[self._draw.randrange(len(spoilt))] = self._draw.randrange(256)
        return bytes(spoilt)

    def _bad_utf8(self, body: bytes) -> bytes:
        bad = self._draw.choice([b"\xff\xfe", b"\xc3(", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
        return body.replace(b'": "', b'": "' + bad, 1)

    def _controls(self, body: bytes) -> bytes:
        place = self._draw.randrange(len(body))
        return body[:place] + self._draw.choice([b"\0", b"\x1b", b"\r\n", b"\x7f"]) + body[place:]

    def _nested(self, body: bytes) -> bytes:
        depth = self._draw.choice([50, 500, 5000, 200_000])
        left, right = self._draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
        inner = left * depth + b"1" + right * depth
        return b"%s,%s:%s}" % (body[:-1], self._draw.choice([b'"prompt"', b'"x"']), inner)

    def _huge_number(self, body: bytes) -> bytes:
        number = self._draw.choice(
            [b"9" * 5000, b"1e400", b"-1e99999", b"NaN", b"Infinity", b"0x10", b"1" + b"0" * 30]
        )
        name = self._draw.choice(["max_tokens", "seed", "temperature", "n", "top_k", "tokens"])
        return b'%s,"%s":%s}' % (body[:-1], name.encode(), number)

    # ------------------------------------------------------------------ frames

    def _length_too_long(self, path: str, body: bytes) -> bytes:
        return _request(path, body, length=len(body) + self._draw.choice([1, 1000, 10**12]))

    def _length_nonsense(self, path: str, body: bytes) -> bytes:
        given = self._draw.choice([b"-1", b"abc", b"", b"1e3", b"9" * 60, b"0x10", b"+5", b"5, 5"])
        return _head(path, b"content-length: " + given) + body

    def _two_lengths(self, path: str, body: bytes) -> bytes:
        lengths = b"content-length: %d\r\ncontent-length: 3" % len(body)
        return _head(path, lengths) + body

    def _length_and_chunked(self, path: str, body: bytes) -> bytes:
        both = b"content-length: %d\r\ntransfer-encoding: chunked" % len(body)
        return _head(path, both) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)

    def _chunked_nonsense(self, path: str, body: bytes) -> bytes:
        size = self._draw.choice([b"zz", b"-5", b"", b"F" * 40, b"5;" + b"x" * 5000, b"\0"])
        return _head(path, b"transfer-encoding: chunked") + size + b"\r\n" + body + b"\r\n"

    def _chunked_cut_off(self, path: str, body: bytes) -> bytes:
        whole = b"%x\r\n%s\r\n" % (len(body), body)
        return _head(path, b"transfer-encoding: chunked") + self._truncated(whole)

    def _request_line(self, path: str, body: bytes) -> bytes:
        line = self._draw.choice(
            [
                b"GET", b"POST  HTTP/1.1", b"POST / HTTP/9.9", b"\x16\x03\x01\x02",
                b"PRI * HTTP/2.0",
                b"POST /" + b"a" * 70_000 + b" HTTP/1.1", b"G\0T / HTTP/1.1", b"POST /%00 HTTP/1.1",
                b"POST //../../etc/passwd HTTP/1.1", b"POST http://x/v1/models HTTP/1.1",
                b"POST /v1/completions\xff HTTP/1.1",
            ]
        )  # fmt: skip
        return line + b"\r\nhost: x\r\nconnection: close\r\n\r\n" + body

    def _headers(self, path: str, body: bytes) -> bytes:
        odd = self._draw.choice(
            [
                b"x: \0", b": x", b"no colon", b"x: " + b"y" * 100_000, b"x y: 1",
                b"\r\n".join(b"h%d: 1" % i for i in range(2000)), b"x: a\n b",
                b"x-request-id: \xff",
                b"authorization: Bearer \xff\xfe", b"expect: 200-maybe", b"upgrade: websocket",
                b"content-encoding: gzip", b"transfer-encoding: gzip, chunked",
            ]
        )  # fmt: skip
        return _head(path, odd + b"\r\ncontent-length: %d" % len(body)) + body


def _head(path: str, headers: bytes) -> bytes:
    return (
        b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        b"content-type: application/json\r\n%s\r\n\r\n" % (path.encode(), headers)
    )


def _request(path: str, body: bytes, length: int | None = None) -> bytes:
    return _head(path, b"content-length: %d" % (len(body) if length is None else length)) + body
