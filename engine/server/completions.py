"""POST /v1/completions: plain prompts, several at once, answered whole or as events.

Choices are numbered as OpenAI does: prompt * n + sample.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from engine.runtime.request import FinishReason
from engine.server.answers import CompletionAnswer, CompletionChoice, Usage
from engine.server.errors import bad_request
from engine.server.exchange import Exchange
from engine.server.front import FrontEnd
from engine.server.generation import Collected, Job, collect, generate, make_job
from engine.server.limits import check_serving
from engine.server.logprobs import CompletionTally
from engine.server.messages import Logprobs, TokenDelta
from engine.server.prompts import prompts_ids, separate
from engine.server.protocol import CompletionBody, Prompts, decode
from engine.server.requests import read_body, wants_usage
from engine.server.sampling import overrides
from engine.server.service import Service
from engine.server.sse import NULL, ChunkFrame, encode, send_events

ROUTE = "/v1/completions"
KIND = "text_completion"
LENGTH = FinishReason.length.value
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Asked:
    """How the answer is to look. `scores_only`: max_tokens 0, nothing but the prompt comes back."""

    echo: bool
    logprobs: bool
    scores_only: bool

    @classmethod
    def of(cls, body: CompletionBody) -> "_Asked":
        """Raises ApiError."""
        asked = cls(bool(body.echo), body.logprobs is not None, body.max_tokens == 0)
        if asked.scores_only and not asked.echo:
            raise bad_request(
                "max_tokens: got 0, allowed is a whole number >= 1, or 0 together with echo",
                param="max_tokens",
            )
        if asked.echo and asked.logprobs and body.stream and (body.n or 1) > 1:
            raise bad_request(
                "echo: cannot be streamed with logprobs and n above 1; leave one of them out",
                param="echo",
            )
        return asked


async def completions(service: Service, exchange: Exchange) -> None:
    check_serving(service.client)
    body = decode(await read_body(service, exchange), CompletionBody)
    asked, with_usage = _Asked.of(body), wants_usage(body)
    answer_id, created = f"cmpl-{exchange.request_id}", int(time.time())
    if body.stream:
        frame = ChunkFrame(answer_id, KIND, created, body.model, with_usage=with_usage)
        events = _events(service, exchange, body, asked, frame, with_usage=with_usage)
        await send_events(exchange, events, service.cfg.request_timeout_s)
        return
    async with exchange.attended(service.cfg.request_timeout_s):
        job = await _job(service, body, asked)
        found = await collect(service, job, ROUTE, exchange.request_id)
    writer = _Writer(service.front, body.prompt, job, asked)
    choices = [
        writer.choice(number, sample, own[0].prompt_logprobs)
        for number, own in enumerate(found)
        for sample in own
    ]
    num_tokens = sum(sample.num_tokens for own in found for sample in own)
    usage = Usage.of(job.num_prompt_tokens, 0 if asked.scores_only else num_tokens)
    await exchange.answer(encode(CompletionAnswer(answer_id, created, body.model, choices, usage)))


async def _events(
    service: Service,
    exchange: Exchange,
    body: CompletionBody,
    asked: _Asked,
    frame: ChunkFrame,
    *,
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    job = await _job(service, body, asked)
    writer = _Writer(service.front, body.prompt, job, asked)
    num_tokens = 0
    async with aclosing(generate(service, job, ROUTE, exchange.request_id)) as deltas:
        async for number, delta in deltas:
            num_tokens += delta.token_id is not None and not asked.scores_only
            for event in writer.chunks(frame, number, delta):
                yield event
    if with_usage:
        yield frame.usage(Usage.of(job.num_prompt_tokens, num_tokens))


class _Writer:
    """Choices of one answer, whole or in chunks."""

    def __init__(self, front: FrontEnd, prompts: Prompts, job: Job, asked: _Asked) -> None:
        self._prompts = separate(prompts)
        self._front = front
        self._job = job
        self._asked = asked
        self._tallies: dict[int, CompletionTally] = {}

    def choice(
        self, number: int, sample: Collected, prompt_logprobs: list[Logprobs | None]
    ) -> CompletionChoice:
        """Sample of prompt `number`, whose tokens have `prompt_logprobs`."""
        asked, tally = self._asked, CompletionTally(self._front)
        text = self._prompt_text(number) if asked.echo else ""
        if asked.echo and asked.logprobs:
            tally.add_prompt(self._job.prompts[number], prompt_logprobs)
        if not asked.scores_only:
            text += sample.text
            for token_id, found in sample.logprobs:
                tally.add(token_id, found)
        return CompletionChoice(
            self._place(number, sample.index),
            text,
            tally.take() if asked.logprobs else None,
            LENGTH if asked.scores_only else sample.finish_reason,
        )

    def chunks(self, frame: ChunkFrame, number: int, delta: TokenDelta) -> Iterator[bytes]:
        """The chunks of one delta; the first of a choice may echo its prompt."""
        asked, place = self._asked, self._place(number, delta.index)
        tally = self._tallies.get(place)
        if tally is None:
            tally = self._tallies[place] = CompletionTally(self._front)
            if asked.echo:
                if asked.logprobs:
                    tally.add_prompt(self._job.prompts[number], delta.prompt_logprobs)
                yield self._chunk(frame, place, self._prompt_text(number), tally, None)
        if asked.scores_only:
            yield self._chunk(frame, place, "", tally, LENGTH)
            return
        if delta.token_id is not None and delta.logprobs is not None:
            tally.add(delta.token_id, delta.logprobs)
        if delta.text or asked.logprobs or delta.finish_reason is not None:
            yield self._chunk(frame, place, delta.text, tally, delta.finish_reason)

    def _chunk(
        self, frame: ChunkFrame, place: int, text: str, tally: CompletionTally, reason: str | None
    ) -> bytes:
        logprobs = encode(tally.take()) if self._asked.logprobs else NULL
        return frame.event(place, b'"text":%s' % encode(text), logprobs, reason)

    def _place(self, number: int, index: int) -> int:
        return number * self._job.params.n + index

    def _prompt_text(self, number: int) -> str:
        given = self._prompts[number]
        if isinstance(given, str):
            return given
        return self._front.tokenizer.decode(given, skip_special_tokens=False)


async def _job(service: Service, body: CompletionBody, asked: _Asked) -> Job:
    """Raises ApiError, RequestError."""
    front = service.front
    target = await service.names.target(body.model, body.adapter)
    prompts = await prompts_ids(
        front.tokenizer,
        body.prompt,
        service.client.info.vocab_size,
        special=body.add_special_tokens is not False,
    )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    values = overrides(
        body, service.cfg, max_tokens=1 if asked.scores_only else max_tokens, logprobs=body.logprobs
    )
    if asked.echo and asked.logprobs:
        values["prompt_logprobs"] = body.logprobs
    return make_job(service, prompts, values, target, body.priority)
