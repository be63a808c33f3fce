"""Continuous batching: which tokens of which requests the next step computes.

Decoding rows come first, then prompts in chunks, all within `max_step_tokens`. A request is
admitted, whether new or preempted, when a running place, its adapters' slots and the pages for the
tokens it has are there; pages for further tokens are taken as they come. When there are none left,
the least important running request is preempted: its pages go to the prefix cache or are freed, it
goes back to its place in the line and is recomputed later. The most important one is never
preempted, and `submit` refuses what could not run alone, so that something always advances.
"""

from collections.abc import Sequence

from loguru import logger

from engine.config import SchedulerConfig
from engine.errors import RequestError
from engine.lora.manager import LoRAManager
from engine.memory.pages import PageAllocator
from engine.memory.prefix_cache import PrefixCache
from engine.runtime.request import FinishReason, Request, ScheduledRow
from engine.scheduling.queue import Verdict, WaitingQueue


class Scheduler:
    """Owns requests from submission to their end; every ending goes through `finish`, once."""

    def __init__(
        self,
        cfg: SchedulerConfig,
        pages: PageAllocator,
        prefix_cache: PrefixCache,
        lora_manager: LoRAManager,
    ) -> None:
        self.cfg = cfg
        self.pages = pages
        self.prefix_cache = prefix_cache
        self.lora_manager = lora_manager
        self.waiting = WaitingQueue(cfg.max_skips, cfg.drain_after_s)
        self.running: dict[int, Request] = {}
        # Since the start; a preempted request's prompt counts once.
        self.num_prompt_tokens = self.num_cached_prompt_tokens = self.num_generated_tokens = 0
        self.num_preemptions = 0
        # Pages that the tokens of running requests will need beyond those they have.
        self._num_promised = 0
        lora_manager.on_forgotten(prefix_cache.drop)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could never be admitted."""
        if self.pages.pages_for(request.max_total_tokens) > self.pages.num_pages:
            raise RequestError(
                f"the request may need {request.max_total_tokens} tokens of KV "
                f"({len(request.prompt_ids)} prompt + max_tokens {request.params.max_tokens}), "
                "the pool has "
                f"{self.pages.num_pages * self.pages.page_size}; ask for fewer or raise "
                "memory.fraction"
            )
        self.lora_manager.open(request.adapters)
        self.waiting.add(request)

    def schedule(self) -> list[ScheduledRow]:
        """Rows of the next step; pages for their tokens are allocated."""
        rows: dict[int, ScheduledRow] = {}
        budget = self.cfg.max_step_tokens
        for request in sorted(self.running.values(), key=_by_need):
            if request.request_id in self.running and budget > 0:
                freed = self._make_room(rows, request, budget)
                budget += freed - self._add_row(rows, request, budget)
        if budget > 0 and len(self.running) < self.cfg.max_running_requests:
            self._num_promised = sum(map(self._num_missing, self.running.values()))
            for request in self.waiting.admit(self._admit):
                budget -= self._add_row(rows, request, budget)
        return list(rows.values())

    def extend(self, rows: Sequence[ScheduledRow]) -> bool:
        """Pages for one more token of each of `rows`, which decode in a step that is under way, so
        that the same rows can go on before their tokens are known. False, and nothing taken, if
        somebody waits or there are too few.
        """
        missing = [
            max(0, self.pages.pages_for(row.request.num_computed + 2) - len(row.request.pages))
            for row in rows
        ]
        if len(self.waiting) or sum(missing) > self.prefix_cache.num_available:
            return False
        for row, count in zip(rows, missing, strict=True):
            if count:
                row.request.pages.extend(self.prefix_cache.allocate(count))
        return True

    def advance(self, row: ScheduledRow, token_id: int | None) -> None:
        """A step has computed `row`; `token_id` was sampled from it if it samples."""
        request = row.request
        request.num_computed += row.num_new
        self._cache_full_pages(request)
        if token_id is not None:
            request.output_ids.append(token_id)
            self.num_generated_tokens += 1

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, waiting or running, and give back all it holds. Does nothing the second
        time.
        """
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if not self.waiting.remove(request):
            self._stop(request)
        self.lora_manager.close(request.adapters)

    def check_integrity(self) -> None:
        """Assert that pages, cached prefixes and adapter counts agree with the running requests."""
        self.pages.check_integrity()
        running = list(self.running.values())
        self.prefix_cache.check_integrity([request.prefix for request in running])
        for request in running:
            shared = [cached.page for cached in request.prefix]
            assert request.pages[: len(shared)] == shared
        own = [page for r in running for page in r.pages[len(r.prefix) :]]
        assert len(set(own)) == len(own), "a page belongs to two requests"
        num_cached = self.prefix_cache.stats().num_cached_pages
        assert len(own) + num_cached + self.pages.num_free == self.pages.num_pages
        assert not any(request.pages or request.prefix for request in self.waiting)
        self.lora_manager.check_integrity()

    # ------------------------------------------------------------------ private work

    def _num_missing(self, request: Request) -> int:
        """Pages that a request's tokens need beyond those it has."""
        return max(0, self.pages.pages_for(request.num_tokens) - len(request.pages))

    def _admit(self, request: Request) -> Verdict:
        """The one gate, for new and preempted requests alike."""
        if len(self.running) >= self.cfg.max_running_requests:
            return Verdict.closed
        if self._waits_for_leader(request):
            return Verdict.later
        if not self.lora_manager.activate(request.adapters):
            return Verdict.passed_over
        known = request.prompt_ids + request.output_ids
        can_hit = request.use_prefix_cache and self.prefix_cache.enabled
        request.prefix = self.prefix_cache.acquire(request.adapters, known) if can_hit else []
        request.pages = [cached.page for cached in request.prefix]
        # A page for each running request's next tokens: admitting must not force a preemption.
        needed = self._num_missing(request) + self._num_promised + len(self.running)
        if self.running and needed > self.prefix_cache.num_available:
            self._give_back(request)
            self.lora_manager.deactivate(request.adapters)
            return Verdict.closed
        self._num_promised += self._num_missing(request)
        request.num_computed = len(request.pages) * self.pages.page_size
        if can_hit:
            num_hit = min(request.num_computed, len(request.prompt_ids))
            request.num_cached_tokens = num_hit
            self.prefix_cache.count(len(request.prompt_ids), num_hit)
        if not request.num_preemptions:
            self.num_prompt_tokens += len(request.prompt_ids)
            self.num_cached_prompt_tokens += request.num_cached_tokens
        self.running[request.request_id] = request
        logger.debug("request {}: admitted, {} tokens", request.request_id, request.num_tokens)
        return Verdict.admitted

    def _waits_for_leader(self, request: Request) -> bool:
        """Whether pages that the request could share are still being computed."""
        leader = request.leader
        if leader is None or leader.finish_reason is not None or not self.prefix_cache.enabled:
            return False
        shared = (len(leader.prompt_ids) - 1) // self.pages.page_size * self.pages.page_size
        return request.use_prefix_cache and leader.num_computed < shared

    def _make_room(self, rows: dict[int, ScheduledRow], request: Request, budget: int) -> int:
        """Preempt until there are pages for a request's next tokens, itself if it is the least
        important; the tokens of rows that were given up.
        """
        freed = 0
        while self._num_pages_for_step(request, budget) > self.prefix_cache.num_available:
            victim = max(self.running.values(), key=lambda own: own.importance)
            row = rows.pop(victim.request_id, None)
            freed += row.num_new if row is not None else 0
            self._preempt(victim)
            if victim is request:
                break
        return freed

    def _num_pages_for_step(self, request: Request, budget: int) -> int:
        num_new = min(request.num_pending, budget)
        return self.pages.pages_for(request.num_computed + num_new) - len(request.pages)

    def _preempt(self, request: Request) -> None:
        self._stop(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)
        logger.debug("request {}: preempted, {} tokens", request.request_id, request.num_tokens)

    def _stop(self, request: Request) -> None:
        """Take a request out of the running ones, with its pages and slots."""
        del self.running[request.request_id]
        self._give_back(request)
        self.lora_manager.deactivate(request.adapters)

    def _give_back(self, request: Request) -> None:
        own = request.pages[len(request.prefix) :]
        failed = request.finish_reason is FinishReason.error
        give_up = self.prefix_cache.discard if failed else self.prefix_cache.release
        give_up(request.prefix)
        self.pages.free(own, dirty=bool(request.adapters) or failed)
        request.pages, request.prefix = [], []

    def _cache_full_pages(self, request: Request) -> None:
        """Let others share the pages that have become full."""
        if not self.prefix_cache.enabled:
            return
        size = self.pages.page_size
        for index in range(len(request.prefix), request.num_computed // size):
            tokens = tuple(request.token_slice(index * size, size))
            before = request.prefix[-1] if request.prefix else None
            cached = self.prefix_cache.add(request.adapters, before, tokens, request.pages[index])
            request.prefix.append(cached)
            request.pages[index] = cached.page

    def _add_row(self, rows: dict[int, ScheduledRow], request: Request, budget: int) -> int:
        """Schedule as many of a request's pending tokens as fit; how many these are."""
        num_new = min(request.num_pending, budget)
        if num_new <= 0 or request.request_id not in self.running:
            return 0
        missing = self._num_pages_for_step(request, budget)
        if missing > 0:
            request.pages.extend(self.prefix_cache.allocate(missing))
        rows[request.request_id] = ScheduledRow(request, num_new)
        return num_new


def _by_need(request: Request) -> tuple[bool, tuple[bool, int, int]]:
    """Decoding requests first, then prompts; the more important ones first."""
    return request.num_pending > 1, request.importance
