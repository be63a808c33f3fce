"""Answers as server-sent events: bytes of chunks with all that stays the same built once, and the
sending of them.

Knows the frame of OpenAI's chunks, not what fills it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from engine.server.answers import Usage
from engine.server.errors import ClientGone, as_api_error
from engine.server.exchange import Exchange

DONE = b"data: [DONE]\n\n"
LAST_WORD_S = 1.0
NULL = b"null"

encode = msgspec.json.Encoder().encode


class ChunkFrame:
    """Everything of a chunk but its one choice."""

    def __init__(
        self, chunk_id: str, kind: str, created: int, model: str, *, with_usage: bool
    ) -> None:
        """`with_usage`: chunks say that their usage is null, for a last one has it."""
        head = encode({"id": chunk_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1]
        self._before = self._head + b',"choices":[{"index":'
        self._after = (b'}],"usage":null}' if with_usage else b"}]}") + b"\n\n"

    def event(self, index: int, content: bytes, logprobs: bytes, reason: str | None) -> bytes:
        """One choice. `content`: `"text":...` or `"delta":...`."""
        return b"".join(
            (
                self._before,
                b"%d," % index,
                content,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                NULL if reason is None else b'"%s"' % reason.encode(),
                self._after,
            )
        )

    def usage(self, usage: Usage) -> bytes:
        """The last chunk of a stream that was asked for its usage."""
        return b"".join((self._head, b',"choices":[],"usage":', encode(usage), b"}\n\n"))


async def send_events(
    exchange: Exchange, events: AsyncGenerator[bytes, None], timeout_s: float | None
) -> None:
    """Send events and the end mark. What fails before the first one raises, as any refusal does;
    later it is an event itself, the last one.
    """
    try:
        async with exchange.attended(timeout_s), aclosing(events):
            async for event in events:
                if not exchange.started:
                    await exchange.open_stream()
                await exchange.push(event)
            await exchange.end(DONE)
    except Exception as error:
        if not exchange.started or isinstance(error, ClientGone):
            raise
        await _last_word(exchange, error)


async def _last_word(exchange: Exchange, error: Exception) -> None:
    """Tell what went wrong, unless the caller reads nothing: then the connection is cut."""
    refused = as_api_error(error, exchange.request_id)
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await exchange.end(b"data: " + refused.body() + b"\n\n")
    except TimeoutError:
        raise ClientGone from error
