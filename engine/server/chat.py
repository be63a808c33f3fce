"""POST /v1/chat/completions: a conversation through the model's template, answered whole or as
events.

Tools are shown to the template; what the model writes comes back as content, calls are not parsed.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.server.answers import (
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from engine.server.errors import bad_request
from engine.server.exchange import Exchange
from engine.server.generation import Collected, Job, collect, generate, make_job, room
from engine.server.limits import check_serving
from engine.server.logprobs import chat_entry
from engine.server.messages import TokenDelta
from engine.server.prompts import chat_ids
from engine.server.protocol import ChatBody, decode
from engine.server.requests import read_body, wants_usage
from engine.server.sampling import overrides
from engine.server.service import Service
from engine.server.sse import NULL, ChunkFrame, encode, send_events

ROUTE = "/v1/chat/completions"
ROLE = "assistant"
FIRST_DELTA = b'"delta":{"role":"assistant","content":""}'
EMPTY_DELTA = b'"delta":{}'


async def chat_completions(service: Service, exchange: Exchange) -> None:
    check_serving(service.client)
    body = decode(await read_body(service, exchange), ChatBody)
    answer_id, created = f"chatcmpl-{exchange.request_id}", int(time.time())
    with_usage = wants_usage(body)
    if body.stream:
        frame = ChunkFrame(
            answer_id, "chat.completion.chunk", created, body.model, with_usage=with_usage
        )
        events = _events(service, exchange, body, frame, with_usage=with_usage)
        await send_events(exchange, events, service.cfg.request_timeout_s)
        return
    async with exchange.attended(service.cfg.request_timeout_s):
        job = await _job(service, body)
        [samples] = await collect(service, job, ROUTE, exchange.request_id)
    answer = ChatAnswer(
        answer_id,
        created,
        body.model,
        [_choice(service, sample, logprobs=bool(body.logprobs)) for sample in samples],
        Usage.of(job.num_prompt_tokens, sum(sample.num_tokens for sample in samples)),
    )
    await exchange.answer(encode(answer))


async def _events(
    service: Service, exchange: Exchange, body: ChatBody, frame: ChunkFrame, *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    job = await _job(service, body)
    begun: set[int] = set()
    num_tokens = 0
    async with aclosing(generate(service, job, ROUTE, exchange.request_id)) as deltas:
        async for _, delta in deltas:
            num_tokens += delta.token_id is not None
            if delta.index not in begun:
                begun.add(delta.index)
                yield frame.event(delta.index, FIRST_DELTA, NULL, None)
            if delta.text or delta.logprobs is not None or delta.finish_reason is not None:
                yield _chunk(service, frame, delta)
    if with_usage:
        yield frame.usage(Usage.of(job.num_prompt_tokens, num_tokens))


def _chunk(service: Service, frame: ChunkFrame, delta: TokenDelta) -> bytes:
    content = b'"delta":{"content":%s}' % encode(delta.text) if delta.text else EMPTY_DELTA
    logprobs = NULL
    if delta.logprobs is not None and delta.token_id is not None:
        logprobs = encode(ChatLogprobs([chat_entry(service.front, delta.token_id, delta.logprobs)]))
    return frame.event(delta.index, content, logprobs, delta.finish_reason)


def _choice(service: Service, sample: Collected, *, logprobs: bool) -> ChatChoice:
    entries = [chat_entry(service.front, *pair) for pair in sample.logprobs]
    found = ChatLogprobs(entries) if logprobs else None
    return ChatChoice(sample.index, ChatMessage(ROLE, sample.text), found, sample.finish_reason)


async def _job(service: Service, body: ChatBody) -> Job:
    """Raises ApiError, RequestError."""
    target = await service.names.target(body.model, body.adapter)
    ids = await chat_ids(service.front.tokenizer, body, tools=_shows_tools(body))
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = room(service.client, ids)
    values = overrides(body, service.cfg, max_tokens=max_tokens, logprobs=_num_logprobs(body))
    return make_job(service, [ids], values, target, body.priority)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs true beside it", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _shows_tools(body: ChatBody) -> bool:
    """Whether the template sees the tools."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return choice != "none"
    raise bad_request(
        "tool_choice: calls are not forced here, allowed are 'auto' and 'none'; to force the form "
        "of an answer give response_format with a JSON schema",
        param="tool_choice",
        code="unsupported_parameter",
    )
