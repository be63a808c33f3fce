"""Continuous batching: which tokens of which requests the next step computes.

Decoding rows come first, then prompts in chunks, all within `max_step_tokens`. A request is
admitted when a running place, its adapter's slot and the pages for its longest possible output are
all there; otherwise it waits. Pages are committed at admission and handed out as tokens come, so a
running request never stops for want of one.
"""

from loguru import logger

from engine.config import SchedulerConfig
from engine.errors import RequestError
from engine.lora.manager import LoRAManager
from engine.memory.pages import PageAllocator
from engine.runtime.request import FinishReason, Request, ScheduledRow
from engine.scheduling.queue import WaitingQueue


class Scheduler:
    """Owns requests from submission to their end; every ending goes through `finish`, once."""

    def __init__(
        self, cfg: SchedulerConfig, pages: PageAllocator, lora_manager: LoRAManager
    ) -> None:
        self.cfg = cfg
        self.pages = pages
        self.lora_manager = lora_manager
        self.waiting = WaitingQueue(cfg.max_skips)
        self.running: dict[int, Request] = {}
        self._committed_pages = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could never be admitted."""
        needed = self._pages_needed(request)
        if needed > self.pages.num_pages:
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
        budget = self.cfg.max_step_tokens
        rows: list[ScheduledRow] = []
        by_need = sorted(self.running.values(), key=lambda request: request.num_pending > 1)
        for request in by_need:
            budget -= self._add_row(rows, request, budget)
        if budget > 0:
            for request in self.waiting.admit(self._admit):
                budget -= self._add_row(rows, request, budget)
        return rows

    def advance(self, row: ScheduledRow, token_id: int | None) -> None:
        """A step has computed `row`; `token_id` was sampled from it if it samples."""
        row.request.num_computed += row.num_new
        if token_id is not None:
            row.request.output_ids.append(token_id)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, waiting or running, and give back all it holds. Does nothing the second
        time.
        """
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if not self.waiting.remove(request):
            del self.running[request.request_id]
            self.pages.free(request.pages)
            request.pages = []
            self._committed_pages -= self._pages_needed(request)
            self.lora_manager.deactivate(request.adapters)
        self.lora_manager.close(request.adapters)

    def check_integrity(self) -> None:
        """Assert that pages, commitments and adapter counts agree with the running requests."""
        self.pages.check_integrity()
        held = sum(len(request.pages) for request in self.running.values())
        assert held + self.pages.num_free == self.pages.num_pages
        assert self._committed_pages == sum(map(self._pages_needed, self.running.values()))
        assert self._committed_pages <= self.pages.num_pages
        self.lora_manager.check_integrity()

    def _pages_needed(self, request: Request) -> int:
        return self.pages.pages_for(request.max_total_tokens)

    def _admit(self, request: Request) -> bool:
        needed = self._pages_needed(request)
        if len(self.running) >= self.cfg.max_running_requests:
            return False
        if self._committed_pages + needed > self.pages.num_pages:
            return False
        if not self.lora_manager.activate(request.adapters):
            return False
        self._committed_pages += needed
        self.running[request.request_id] = request
        logger.debug("request {}: admitted, {} tokens", request.request_id, request.num_tokens)
        return True

    def _add_row(self, rows: list[ScheduledRow], request: Request, budget: int) -> int:
        num_new = min(request.num_pending, budget)
        if num_new <= 0:
            return 0
        missing = self.pages.pages_for(request.num_computed + num_new) - len(request.pages)
        request.pages.extend(self.pages.allocate(missing))
        rows.append(ScheduledRow(request, num_new))
        return num_new
