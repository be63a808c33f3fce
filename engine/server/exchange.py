"""One HTTP request and its answer over plain ASGI: the body within its limit, answers whole or as
events.

Knows nothing of routes and of what bodies mean.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError, ClientGone, Header, timed_out

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
CLOSE: Header = (b"connection", b"close")


class Exchange:
    """`started`: the status is sent. Handlers read the body first, then answer once."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.headers = Headers(scope=scope)
        self.started = False
        self._receive = receive
        self._send = send

    async def body(self, max_bytes: int, knob: str, timeout_s: float | None) -> bytes:
        """All of it. Raises ApiError above `max_bytes`, which `knob` sets, or when the time is
        up; ClientGone.
        """
        declared = self.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes, knob)
        received = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    received += message.get("body", b"")
                    if len(received) > max_bytes:
                        raise _too_large(max_bytes, knob)
                    if not message.get("more_body", False):
                        return bytes(received)
        except TimeoutError as error:
            raise ApiError(
                408,
                f"the body did not arrive within {timeout_s:g} s (server.request_timeout_s)",
                kind="timeout_error",
                code="timeout",
                headers=(CLOSE,),
            ) from error

    @asynccontextmanager
    async def attended(self, timeout_s: float | None) -> AsyncIterator[None]:
        """The block is given up when the caller leaves (ClientGone) or the time is up (ApiError).
        The body must have been read.
        """
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(timeout_s) as deadline:
                watcher = asyncio.create_task(watch())
                try:
                    yield
                finally:
                    watcher.cancel()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            if gone or timeout_s is None:
                raise ClientGone from error
            raise timed_out(timeout_s) from error

    async def answer(
        self,
        body: bytes,
        *,
        status: int = 200,
        media_type: bytes = JSON,
        headers: tuple[Header, ...] = (),
    ) -> None:
        """The whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, ((b"content-type", media_type), length, *headers))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def open_stream(self) -> None:
        """Send the head of an event stream; `push` and `end` follow."""
        await self._start(200, ((b"content-type", EVENT_STREAM), *STREAM_HEADERS))

    async def push(self, data: bytes) -> None:
        """Waits while the caller reads too slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error; nothing may have been sent."""
        await self.answer(error.body(), status=error.status, headers=error.headers)

    async def _start(self, status: int, headers: tuple[Header, ...]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _too_large(max_bytes: int, knob: str) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {max_bytes} bytes, which {knob} allows; send less",
        code="request_too_large",
        headers=(CLOSE,),
    )


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]
