"""A scheduler without tensors: adapters are real slots and ranges without weights, the model is a
counter that appends tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import EvictionPolicy, MemoryConfig, SchedulerConfig
from engine.lora.ref import LoRAUse
from engine.lora.slots import Slots
from engine.memory.pages import PageAllocator
from engine.memory.prefix_cache import PrefixCache
from engine.runtime.request import FinishReason, Request
from engine.runtime.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler


@dataclass
class Load:
    rank: int
    num_open: int = 0
    retired: bool = False


class Adapters:
    """Use counts and residency as the LoRA manager keeps them, without weights."""

    def __init__(self, num_slots: int, rows: int) -> None:
        self.slots = Slots(num_slots, rows, 16, EvictionPolicy.lru)
        self.loads: dict[str, Load] = {}

    def open(self, uses: Sequence[LoRAUse]) -> None:
        assert not any(self.loads[use.lora_id].retired for use in uses)
        for use in uses:
            self.loads[use.lora_id].num_open += 1

    def close(self, uses: Sequence[LoRAUse]) -> None:
        for use in uses:
            self.loads[use.lora_id].num_open -= 1
            assert self.loads[use.lora_id].num_open >= 0
            self.forget_if_unused(use.lora_id)

    def retire(self, lora_id: str) -> None:
        self.loads[lora_id].retired = True
        self.forget_if_unused(lora_id)

    def forget_if_unused(self, lora_id: str) -> None:
        load = self.loads[lora_id]
        if load.retired and load.num_open == 0:
            if self.slots.get(lora_id) is not None:
                self.slots.remove(lora_id)
            del self.loads[lora_id]
            self.listener(lora_id)

    def on_forgotten(self, listener: Callable[[str], None]) -> None:
        self.listener = listener

    def activate(self, uses: Sequence[LoRAUse]) -> bool:
        if self.activate_all(uses):
            return True
        if any(resident.users for resident in self.slots.residents):
            return False
        self.slots.remove_idle()
        return self.activate_all(uses)

    def activate_all(self, uses: Sequence[LoRAUse]) -> bool:
        for index, use in enumerate(uses):
            rank = self.loads[use.lora_id].rank
            if self.slots.get(use.lora_id) is None and not self.slots.place(
                use.lora_id, rank, pinned=False, evict=True
            ):
                self.deactivate(uses[:index])
                return False
            self.slots.use(use.lora_id)
        return True

    def deactivate(self, uses: Sequence[LoRAUse]) -> None:
        for use in uses:
            self.slots.release(use.lora_id)

    def check_integrity(self) -> None:
        assert len(self.slots.residents) <= self.slots.num_slots


class Pool:
    """`numbers`: which request wrote what nobody else may own, by page."""

    page_size = 4

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.zeroed: list[int] = []
        self.numbers: dict[int, int] = {}

    def zero(self, pages: list[int]) -> None:
        self.zeroed += pages
        for page in pages:
            self.numbers.pop(page, None)


def make(
    num_pages: int = 16, num_slots: int = 2, *, prefix_cache: bool = True, **cfg: int
) -> Scheduler:
    values = {"max_running_requests": 4, "max_step_tokens": 8, "max_skips": 3} | cfg
    adapters = Adapters(num_slots, 8 * num_slots + 8)
    pages = PageAllocator(Pool(num_pages))  # type: ignore[arg-type]
    cache = PrefixCache(MemoryConfig(prefix_cache=prefix_cache), pages)
    return Scheduler(SchedulerConfig(**values), pages, cache, adapters)  # type: ignore[arg-type]


def request(
    request_id: int, prompt: int, new: int, *lora_ids: str, priority: int = 0, first: int = 1
) -> Request:
    params = SamplingParams(max_tokens=new)
    uses = tuple(LoRAUse(lora_id) for lora_id in lora_ids)
    return Request(request_id, [first] * prompt, params, 0, uses, priority=priority)


def uses_of(own: Request) -> set[str]:
    return {use.lora_id for use in own.adapters}


def run_step(scheduler: Scheduler, failing: int | None = None) -> int:
    """One step with a model that always answers token 7; requests end at max_tokens. The row at
    place `failing` fails.
    """
    rows = scheduler.schedule()
    numbers = scheduler.pages._kv_pool.numbers  # type: ignore[attr-defined]
    assert sum(row.num_new for row in rows) <= scheduler.cfg.max_step_tokens
    adapters = set().union(*(uses_of(row.request) for row in rows))
    assert len(adapters) <= scheduler.lora_manager.slots.num_slots  # type: ignore[attr-defined]
    for place, row in enumerate(rows):
        own = row.request
        assert len(own.pages) * 4 >= own.num_computed + row.num_new
        private = own.pages[len(own.prefix) :]
        assert {numbers.get(page, own.request_id) for page in private} <= {own.request_id}
        fails = failing is not None and place == failing % len(rows)
        if own.adapters or fails:
            numbers.update(dict.fromkeys(private, own.request_id))
        if fails:
            scheduler.finish(own, FinishReason.error)
            continue
        samples = row.samples
        scheduler.advance(row, 7 if samples else None)
        if samples and len(own.output_ids) == own.params.max_tokens:
            scheduler.finish(own, FinishReason.length)
    return len(rows)
