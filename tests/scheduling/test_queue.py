"""The waiting line: order, passing, and the bound on passing."""

from engine.runtime.request import Request
from engine.runtime.sampling_params import SamplingParams
from engine.scheduling.queue import WaitingQueue


def request(request_id: int, lora_id: str | None = None) -> Request:
    return Request(request_id, [1], SamplingParams(max_tokens=1), 0, lora_id)


def ids(requests: list[Request]) -> list[int]:
    return [r.request_id for r in requests]


def test_first_come_first_served() -> None:
    line = WaitingQueue(max_skips=3)
    for i in range(4):
        line.add(request(i))
    places = iter([True, True, False, False])
    assert ids(line.admit(lambda _: next(places))) == [0, 1]
    assert [r.request_id for r in line] == [2, 3]


def test_others_pass_a_blocked_request_until_the_bound() -> None:
    line = WaitingQueue(max_skips=3)
    line.add(request(0, "blocked"))
    passed = []
    for i in range(1, 9):
        line.add(request(i))
        passed += ids(line.admit(lambda r: r.lora_id is None))
    assert passed == [1, 2, 3], "three may pass, then the line waits"
    assert len(line) == 6
    assert ids(line.admit(lambda r: True)) == [0, 4, 5, 6, 7, 8]


def test_bound_zero_is_strict_order() -> None:
    line = WaitingQueue(max_skips=0)
    line.add(request(0, "blocked"))
    line.add(request(1))
    assert ids(line.admit(lambda r: r.lora_id is None)) == []


def test_removed_requests_are_gone() -> None:
    line = WaitingQueue(max_skips=1)
    only = request(0)
    line.add(only)
    assert line.remove(only) and not line.remove(only)
    assert len(line) == 0
