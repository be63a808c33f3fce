"""The scheduler under random arrivals, aborts, loads and unloads: all is conserved, nobody starves.

Adapters are real slots and ranges without tensors; the model is a counter that appends tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.config import EvictionPolicy, MemoryConfig, SchedulerConfig
from engine.errors import RequestError
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
    page_size = 4

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.zeroed: list[int] = []

    def zero(self, pages: list[int]) -> None:
        self.zeroed += pages


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


def run_step(scheduler: Scheduler) -> int:
    """One step with a model that always answers token 7; requests end at max_tokens."""
    rows = scheduler.schedule()
    assert sum(row.num_new for row in rows) <= scheduler.cfg.max_step_tokens
    adapters = set().union(*(uses_of(row.request) for row in rows))
    assert len(adapters) <= scheduler.lora_manager.slots.num_slots  # type: ignore[attr-defined]
    for row in rows:
        own = row.request
        assert len(own.pages) * 4 >= own.num_computed + row.num_new
        samples = row.samples
        scheduler.advance(row, 7 if samples else None)
        if samples and len(own.output_ids) == own.params.max_tokens:
            scheduler.finish(own, FinishReason.length)
    return len(rows)


class Serving(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(num_pages=14)
        self.adapters: Adapters = self.scheduler.lora_manager  # type: ignore[assignment]
        self.requests: list[Request] = []
        self.num_loads = 0

    @rule(rank=st.sampled_from([1, 8, 12, 16]))
    def load(self, rank: int) -> None:
        self.adapters.loads[f"adapter{self.num_loads}"] = Load(rank)
        self.num_loads += 1

    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        live = sorted(name for name, load in self.adapters.loads.items() if not load.retired)
        if live:
            self.adapters.retire(data.draw(st.sampled_from(live)))

    @rule(
        prompt=st.integers(1, 40),
        new=st.integers(1, 14),
        priority=st.integers(-1, 1),
        first=st.integers(1, 2),
        data=st.data(),
    )
    def submit(self, prompt: int, new: int, priority: int, first: int, data: st.DataObject) -> None:
        live = sorted(name for name, load in self.adapters.loads.items() if not load.retired)
        names = data.draw(st.lists(st.sampled_from(live), max_size=2, unique=True)) if live else []
        if sum(self.adapters.loads[name].rank > 8 for name in names) > 1:
            names = names[:1]  # two of the largest never fit together
        own = request(len(self.requests), prompt, new, *names, priority=priority, first=first)
        self.scheduler.submit(own)
        self.requests.append(own)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.requests)), FinishReason.abort)

    @rule()
    def step(self) -> None:
        run_step(self.scheduler)

    @invariant()
    def conserved(self) -> None:
        self.scheduler.check_integrity()
        open_requests = [r for r in self.requests if r.finish_reason is None]
        for name, load in self.adapters.loads.items():
            assert load.num_open == sum(name in uses_of(r) for r in open_requests)
            resident = self.adapters.slots.get(name)
            users = sum(name in uses_of(r) for r in self.scheduler.running.values())
            assert (resident.users if resident else 0) == users

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            assert run_step(self.scheduler) > 0, "work is left and nothing runs"
        assert not self.scheduler.has_work, "somebody starves"
        assert all(r.finish_reason is not None for r in self.requests)
        self.conserved()
        for own in self.requests:
            if own.finish_reason is FinishReason.length:
                assert len(own.output_ids) == own.params.max_tokens
        self.scheduler.prefix_cache.clear()
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_pages
        assert all(resident.users == 0 for resident in self.adapters.slots.residents)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(2, 30))
def test_a_rare_adapter_is_served_while_popular_ones_keep_coming(
    max_skips: int, prompt: int
) -> None:
    scheduler = make(num_slots=1, max_skips=max_skips, max_running_requests=2)
    scheduler.lora_manager.loads = {"popular": Load(8), "rare": Load(8)}  # type: ignore[attr-defined]
    rare = request(0, prompt, 3, "rare")
    for i in range(1, 3):
        scheduler.submit(request(i, 4, 5, "popular"))
    run_step(scheduler)
    scheduler.submit(rare)
    for i in range(3, 200):
        scheduler.submit(request(i, 4, 5, "popular"))
        run_step(scheduler)
        if rare.finish_reason is not None:
            return
    raise AssertionError("the rare adapter starved")


def test_the_least_important_is_preempted_and_ends_with_all_its_tokens() -> None:
    scheduler = make(num_pages=8, prefix_cache=False)
    requests = [request(i, 8, 15, priority=int(i == 2)) for i in range(3)]
    for own in requests:
        scheduler.submit(own)
    seen = []
    while scheduler.has_work:
        assert run_step(scheduler)
        scheduler.check_integrity()
        seen += [own.request_id for own in requests if own.finish_reason and own not in seen]
    assert seen[0] == 2, "the important one ends first"
    assert requests[2].num_preemptions == 0 and scheduler.num_preemptions > 0
    assert all(len(own.output_ids) == 15 for own in requests)


def test_a_preempted_request_finds_its_pages_again() -> None:
    scheduler = make(num_pages=12)
    first, second = request(0, 9, 20, first=1), request(1, 9, 20, first=2)
    for own in (first, second):
        scheduler.submit(own)
    for _ in range(6):
        run_step(scheduler)
    scheduler._preempt(second)
    assert (second.num_computed, second.pages, second.prefix) == (0, [], [])
    run_step(scheduler)
    assert second.num_cached_tokens == 9 and second.num_computed > 12, "outputs too"
    scheduler.check_integrity()


def test_what_an_adapter_wrote_is_zeroed_before_others_get_it() -> None:
    scheduler = make(num_pages=4, prefix_cache=False)
    scheduler.lora_manager.loads = {"a": Load(8)}  # type: ignore[attr-defined]
    pool = scheduler.pages._kv_pool
    for request_id, names in enumerate([(), ("a",), (), ()]):
        own = request(request_id, 5, 1, *names)
        scheduler.submit(own)
        run_step(scheduler)
        assert own.finish_reason is FinishReason.length
        assert len(pool.zeroed) == (0, 0, 2, 2)[request_id]  # type: ignore[attr-defined]


def test_a_large_request_is_served_while_small_ones_keep_coming() -> None:
    scheduler = make(num_pages=8, max_running_requests=4)
    large = request(0, 30, 2)
    scheduler.submit(request(1, 4, 3))
    run_step(scheduler)
    scheduler.submit(large)
    for i in range(2, 100):
        scheduler.submit(request(i, 4, 3))
        run_step(scheduler)
        if large.finish_reason is not None:
            return
    raise AssertionError("the large request starved")


def test_what_can_never_fit_is_refused_at_once_with_numbers() -> None:
    scheduler = make(num_pages=4)
    with pytest.raises(
        RequestError, match=r"may need 20 tokens of KV \(11 prompt \+ max_tokens 10\).* has 16"
    ):
        scheduler.submit(request(0, 11, 10))
    assert not scheduler.has_work


def test_prompts_are_cut_into_chunks_and_decoding_goes_first() -> None:
    scheduler = make(max_step_tokens=8)
    decoding = request(0, 2, 9)
    scheduler.submit(decoding)
    run_step(scheduler)
    scheduler.submit(request(1, 17, 1))
    seen = []
    for _ in range(3):
        rows = scheduler.schedule()
        seen.append([(row.request.request_id, row.num_new, row.samples) for row in rows])
        for row in rows:
            scheduler.advance(row, 7 if row.samples else None)
    assert seen == [
        [(0, 1, True), (1, 7, False)],
        [(0, 1, True), (1, 7, False)],
        [(0, 1, True), (1, 3, True)],
    ]


def test_samples_of_one_prompt_wait_until_it_is_computed_once() -> None:
    scheduler = make(num_pages=30)
    leader = request(0, 18, 4)
    followers = [request(i, 18, 4) for i in (1, 2)]
    for own in followers:
        own.leader = leader
    for own in (leader, *followers):
        scheduler.submit(own)
    num_computed = []
    while scheduler.has_work:
        rows = scheduler.schedule()
        num_computed.append(sum(row.num_new for row in rows))
        for row in rows:
            scheduler.advance(row, 7 if row.samples else None)
            if len(row.request.output_ids) == 4:
                scheduler.finish(row.request, FinishReason.length)
    assert sum(num_computed) == 18 + 2 * 2 + 3 * 3
    assert [own.num_cached_tokens for own in followers] == [16, 16]
    scheduler.check_integrity()


def test_samples_do_not_wait_for_a_leader_that_is_gone() -> None:
    scheduler = make(num_pages=30)
    leader, follower = request(0, 18, 4), request(1, 18, 4)
    follower.leader = leader
    for own in (leader, follower):
        scheduler.submit(own)
    run_step(scheduler)
    scheduler.finish(leader, FinishReason.abort)
    assert run_step(scheduler) == 1 and follower.num_computed == 16
