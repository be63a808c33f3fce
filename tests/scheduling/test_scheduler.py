"""The scheduler under random arrivals, aborts, faults, loads and unloads: all is conserved, nobody
starves, and nobody owns a page with another's numbers.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_support import Adapters, Load, make, request, run_step, uses_of

from engine.errors import RequestError
from engine.runtime.request import FinishReason, Request
from engine.scheduling.queue import WaitingQueue


class Serving(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(num_pages=14)
        self.now = 0.0
        self.scheduler.waiting = WaitingQueue(3, 5.0, lambda: self.now)
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

    @rule(seconds=st.sampled_from([0, 1, 6]))
    def step(self, seconds: int) -> None:
        run_step(self.scheduler)
        self.now += seconds

    @rule(place=st.integers(0, 3))
    def fail(self, place: int) -> None:
        run_step(self.scheduler, failing=place)

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


def test_prompts_admitted_together_leave_each_other_their_pages() -> None:
    scheduler = make(num_pages=8, max_step_tokens=64)
    for i in range(2):
        scheduler.submit(request(i, 20, 1, first=i))
    while scheduler.has_work:
        assert run_step(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_prompt_waits_with_nothing_in_hand_until_running_ones_keep_a_page_each() -> None:
    scheduler = make(num_pages=5, max_step_tokens=4)
    scheduler.lora_manager.loads = {"a": Load(8)}  # type: ignore[attr-defined]
    first, second = request(0, 4, 9, "a"), request(1, 16, 1, "a")
    scheduler.submit(first)
    while first.num_tokens < 8:
        run_step(scheduler)
    scheduler.submit(second)
    run_step(scheduler)
    assert list(scheduler.running) == [0], "3 pages are missing, 3 are free, one is to be left"
    assert scheduler.lora_manager.slots.get("a").users == 1  # type: ignore[attr-defined]
    scheduler.check_integrity()
    while scheduler.has_work:
        assert run_step(scheduler)
    assert scheduler.num_preemptions == 0 and second.num_cached_tokens == 4


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
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_prompt_tokens) == (18, 0)
    scheduler.submit(request(2, 9, 1, first=1))
    while scheduler.has_work:
        run_step(scheduler)
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_prompt_tokens) == (27, 8)
    assert scheduler.num_generated_tokens == 41, "what is computed again is not counted again"


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


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_an_unimportant_request_ends_while_more_important_ones_keep_coming(
    prefix_cache: bool,
) -> None:
    """It is preempted at first; once overdue it is not."""
    scheduler = make(num_pages=8, prefix_cache=prefix_cache)
    now = [0.0]
    scheduler.waiting = WaitingQueue(3, 5.0, lambda: now[0])
    poor = request(0, 20, 6, priority=-1, first=2)
    scheduler.submit(poor)
    for i in range(1, 200):
        run_step(scheduler)
        scheduler.check_integrity()
        scheduler.submit(request(i, 8, 6, priority=i % 3))
        now[0] += 1.0
        if poor.finish_reason is not None:
            break
    assert len(poor.output_ids) == 6 and poor.overdue and poor.num_preemptions > 0


def test_a_failed_request_leaves_no_pages_that_others_could_hit_or_own() -> None:
    scheduler = make(num_pages=16, max_step_tokens=64)
    pool, cache = scheduler.pages._kv_pool, scheduler.prefix_cache
    failed, reader = request(0, 21, 9), request(1, 13, 9)
    for own in (failed, reader):
        scheduler.submit(own)
        run_step(scheduler)
    shared = [cached.page for cached in reader.prefix]
    suspect = [cached.page for cached in failed.prefix]
    assert len(shared) == 3 and suspect[:3] == shared and len(suspect) == 5
    scheduler.finish(failed, FinishReason.error)
    scheduler.check_integrity()
    assert cache.stats().num_cached_pages == len(shared), "another reads them"
    scheduler.finish(reader, FinishReason.abort)
    cache.allocate(cache.num_available)
    assert set(pool.zeroed) >= set(suspect)  # type: ignore[attr-defined]


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
