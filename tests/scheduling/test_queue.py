"""The waiting line: order, passing, and the bound on passing."""

from collections.abc import Callable

from engine.lora.ref import LoRAUse
from engine.runtime.request import Request
from engine.runtime.sampling_params import SamplingParams
from engine.scheduling.queue import Verdict, WaitingQueue


def request(request_id: int, lora_id: str = "", priority: int = 0) -> Request:
    uses = (LoRAUse(lora_id),) if lora_id else ()
    params = SamplingParams(max_tokens=1)
    return Request(request_id, [1], params, 0, uses, priority=priority)


def only_base(own: Request) -> Verdict:
    return Verdict.passed_over if own.adapters else Verdict.admitted


def anybody(own: Request) -> Verdict:
    return Verdict.admitted


def only_one() -> Callable[[Request], Verdict]:
    verdicts = iter([Verdict.admitted, Verdict.closed])
    return lambda _: next(verdicts)


def ids(requests: list[Request]) -> list[int]:
    return [r.request_id for r in requests]


def test_first_come_first_served() -> None:
    line = WaitingQueue(max_skips=3)
    for i in range(4):
        line.add(request(i))
    verdicts = iter([Verdict.admitted, Verdict.admitted, Verdict.closed])
    assert ids(line.admit(lambda _: next(verdicts))) == [0, 1]
    assert [r.request_id for r in line] == [2, 3]


def test_priority_comes_before_age_and_a_preempted_request_has_its_old_place() -> None:
    line = WaitingQueue(max_skips=3)
    for i, priority in enumerate([0, 2, 1, 2]):
        line.add(request(i, priority=priority))
    assert ids(list(line)) == [1, 3, 2, 0]
    (first, *_) = line
    assert line.remove(first)
    line.add(first)
    assert ids(list(line)) == [1, 3, 2, 0]


def test_others_pass_a_blocked_request_until_the_bound() -> None:
    line = WaitingQueue(max_skips=3)
    line.add(request(0, "blocked"))
    passed = []
    for i in range(1, 9):
        line.add(request(i))
        passed += ids(line.admit(only_base))
    assert passed == [1, 2, 3], "three may pass, then the line waits"
    assert len(line) == 6
    assert ids(line.admit(anybody)) == [0, 4, 5, 6, 7, 8]


def test_nobody_passes_once_the_first_has_waited_long_enough() -> None:
    now = [0.0]
    line = WaitingQueue(max_skips=1000, drain_after_s=5.0, clock=lambda: now[0])
    line.add(request(0, "blocked"))
    for i in range(1, 4):
        line.add(request(i))
        assert ids(line.admit(only_base)) == [i]
        now[0] += 2.0
    line.add(request(4))
    assert ids(line.admit(only_base)) == []
    assert ids(line.admit(anybody)) == [0, 4]
    line.add(request(5, "another"))
    line.add(request(6))
    assert ids(line.admit(only_base)) == [6], "its own time begins when it is first in line"


def test_the_oldest_goes_before_more_important_ones_once_it_has_waited_long_enough() -> None:
    now = [0.0]
    line = WaitingQueue(max_skips=3, drain_after_s=5.0, clock=lambda: now[0])
    old = [request(0), request(1)]
    for own in old:
        line.add(own)
    got = []
    for i in range(2, 16):
        line.add(request(i, priority=1))
        got += ids(line.admit(only_one()))
        now[0] += 1.0
    assert got[:6] == [2, 3, 4, 5, 6, 0], "five seconds, then the oldest"
    assert got[6:12] == [7, 8, 9, 10, 11, 1], "and no more than one in five seconds"
    assert old[0].overdue and old[0].importance < request(99, priority=9).importance


def test_nobody_passes_an_overdue_request_that_must_wait_for_its_adapter() -> None:
    now = [0.0]
    line = WaitingQueue(max_skips=1000, drain_after_s=5.0, clock=lambda: now[0])
    line.add(request(0, "blocked"))
    for i, seconds in ((1, 5.0), (2, 0.0)):
        line.add(request(i, priority=1))
        assert ids(line.admit(only_base)) == ([i] if i == 1 else [])
        now[0] += seconds
    assert ids(list(line)) == [0, 2]
    assert ids(line.admit(anybody)) == [0, 2]


def test_without_a_time_limit_priorities_are_strict() -> None:
    line = WaitingQueue(max_skips=3, drain_after_s=None, clock=lambda: 1e9)
    line.add(request(0))
    for i in range(1, 9):
        line.add(request(i, priority=1))
        assert ids(line.admit(only_one())) == [i]


def test_bound_zero_is_strict_order() -> None:
    line = WaitingQueue(max_skips=0)
    line.add(request(0, "blocked"))
    line.add(request(1))
    assert ids(line.admit(only_base)) == []


def test_removed_requests_are_gone() -> None:
    line = WaitingQueue(max_skips=1)
    only = request(0)
    line.add(only)
    assert line.remove(only) and not line.remove(only)
    assert len(line) == 0
