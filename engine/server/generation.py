"""One HTTP request's way through the engine: admission, its prompts' streams as one, what observers
are told.

Knows nothing of the shapes of answers.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from loguru import logger

from engine.errors import SlowReaderError
from engine.runtime.request import FinishReason
from engine.runtime.sampling_params import SamplingParams
from engine.server.client import EngineClient
from engine.server.errors import bad_request, internal, unavailable
from engine.server.messages import Logprobs, TokenDelta
from engine.server.names import Target
from engine.server.observer import Observer, RequestRecord
from engine.server.prompts import check_prompt_length
from engine.server.sampling import checked, complete
from engine.server.service import Service
from engine.serving.flight import NOTHING_LEFT

NUM_BUFFERED = 64
# A delta and the number of the prompt that it belongs to.
Numbered = tuple[int, TokenDelta]
Deltas = AsyncGenerator[TokenDelta, None]


@dataclass(frozen=True, slots=True)
class Job:
    """What goes to the engine. `sampling` are the fields of `params` that it must be told."""

    prompts: list[list[int]]
    params: SamplingParams
    sampling: dict[str, Any]
    target: Target
    priority: int

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def make_job(
    service: Service,
    prompts: list[list[int]],
    values: dict[str, Any],
    target: Target,
    priority: int | None,
) -> Job:
    """Raises ApiError, RequestError for what this server or engine would not take."""
    check_prompt_length(prompts, service.cfg.max_prompt_tokens)
    defaults = service.front.sampling
    job = Job(prompts, checked(values, defaults), complete(values, defaults), target, priority or 0)
    if job.num_samples > service.cfg.max_requests:
        raise bad_request(
            f"{len(prompts)} prompts with n {job.params.n} make {job.num_samples} requests, at "
            f"most {service.cfg.max_requests} may be open (server.max_requests); send fewer at once"
        )
    return job


def room(client: EngineClient, ids: Sequence[int]) -> int:
    """How many tokens may follow a prompt. Raises ApiError if none."""
    limit = min(client.info.max_model_len, client.stats.num_kv_tokens)
    if len(ids) >= limit:
        raise bad_request(
            f"the prompt has {len(ids)} tokens, which leaves none of the {limit} positions for an "
            "answer; shorten it",
            code="context_length_exceeded",
        )
    return limit - len(ids)


class Collected:
    """One sample's deltas, for an answer as a whole."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason = ""
        self.logprobs: list[tuple[int, Logprobs]] = []
        self.prompt_logprobs: list[Logprobs | None] = []
        self._texts: list[str] = []

    def take(self, delta: TokenDelta) -> None:
        self._texts.append(delta.text)
        self.finish_reason = delta.finish_reason or ""
        self.prompt_logprobs += delta.prompt_logprobs
        if delta.token_id is None:
            return
        self.num_tokens += 1
        if delta.logprobs is not None:
            self.logprobs.append((delta.token_id, delta.logprobs))

    @property
    def text(self) -> str:
        return "".join(self._texts)


async def collect(service: Service, job: Job, route: str, request_id: str) -> list[list[Collected]]:
    """All samples of all prompts, to their end. Raises what `generate` raises."""
    found = [[Collected(index) for index in range(job.params.n)] for _ in job.prompts]
    async with aclosing(generate(service, job, route, request_id)) as deltas:
        async for number, delta in deltas:
            found[number][delta.index].take(delta)
    return found


async def generate(
    service: Service, job: Job, route: str, request_id: str
) -> AsyncGenerator[Numbered, None]:
    """Deltas of all prompts' samples as they come. Leaving early aborts them all.

    Raises ApiError, and what EngineClient.stream raises.
    """
    with service.admission.hold(job.num_samples):
        record = RequestRecord(
            request_id,
            route,
            service.front.model_name,
            job.target.label,
            job.num_prompt_tokens,
            job.num_samples,
        )
        reporter = _Reporter(service.observer, record)
        try:
            async with aclosing(_streams(service.client, job)) as deltas:
                async for number, delta in deltas:
                    reporter.take(number, delta)
                    _check_end(delta, request_id)
                    yield number, delta
        except (GeneratorExit, asyncio.CancelledError, SlowReaderError):
            reporter.reason = "abort"
            raise
        except Exception:
            reporter.reason = "error"
            raise
        finally:
            reporter.finish()


class _Reporter:
    """Tells the observer of one request."""

    def __init__(self, observer: Observer, record: RequestRecord) -> None:
        self.reason = "abort"
        self._observer = observer
        self._record = record
        self._last: dict[tuple[int, int], float] = {}
        observer.started(record)

    def take(self, number: int, delta: TokenDelta) -> None:
        record, now = self._record, time.perf_counter()
        record.num_generated_tokens += delta.token_id is not None
        place = number, delta.index
        if record.first_token_at is None:
            record.first_token_at = now
            self._observer.first_token(record, now - record.started_at)
        elif (before := self._last.get(place)) is not None:
            self._observer.token(record, now - before)
        self._last[place] = now
        self.reason = delta.finish_reason or self.reason

    def finish(self) -> None:
        seconds = time.perf_counter() - self._record.started_at
        self._observer.finished(self._record, self.reason, seconds)


def _check_end(delta: TokenDelta, request_id: str) -> None:
    """Raise ApiError if a sample ended otherwise than by its tokens."""
    if delta.finish_reason == FinishReason.abort.value:
        raise unavailable("the engine gave this request up; send it again")
    if delta.error == NOTHING_LEFT:
        raise bad_request(delta.error)
    if delta.finish_reason == FinishReason.error.value:
        logger.error("request {}: the engine ended it: {}", request_id, delta.error)
        raise internal(request_id)


async def _streams(client: EngineClient, job: Job) -> AsyncGenerator[Numbered, None]:
    """The streams of all prompts as one."""

    def open_stream(prompt: list[int]) -> Deltas:
        choice = job.target.adapter
        return cast(Deltas, client.stream(prompt, job.sampling, choice, priority=job.priority))

    if len(job.prompts) == 1:
        async with aclosing(open_stream(job.prompts[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    async with aclosing(_merged([open_stream(prompt) for prompt in job.prompts])) as both:
        async for numbered in both:
            yield numbered


async def _merged(streams: Sequence[Deltas]) -> AsyncGenerator[Numbered, None]:
    """Deltas of several streams as they come; the first error ends all."""
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(NUM_BUFFERED)

    async def pump(number: int, stream: Deltas) -> None:
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    await queue.put((number, delta))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(*pair)) for pair in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
