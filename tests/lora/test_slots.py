"""Slots: eviction order, pinning, and that running adapters stay where they are."""

import pytest

from engine.config import EvictionPolicy
from engine.errors import AdapterError
from engine.lora.slots import Slots


def make(
    num_slots: int = 3,
    rows: int = 32,
    max_rank: int = 8,
    policy: EvictionPolicy = EvictionPolicy.lru,
) -> Slots:
    return Slots(num_slots, rows, max_rank, policy)


def place(
    slots: Slots, name: str, rank: int = 8, *, pinned: bool = False, evict: bool = True
) -> bool:
    return slots.place(name, rank, pinned=pinned, evict=evict) is not None


def touch(slots: Slots, name: str) -> None:
    slots.use(name)
    slots.release(name)


def names(slots: Slots) -> set[str]:
    return {resident.lora_id for resident in slots.residents}


@pytest.mark.parametrize(
    ("policy", "evicted"), [(EvictionPolicy.lru, "b"), (EvictionPolicy.fifo, "a")]
)
def test_policy_picks_the_victim(policy: EvictionPolicy, evicted: str) -> None:
    slots = make(policy=policy)
    for name in "abc":
        assert place(slots, name)
    touch(slots, "a")
    assert place(slots, "d")
    assert names(slots) == {"a", "b", "c", "d"} - {evicted}
    assert slots.num_evictions == 1


def test_adapters_in_use_and_pinned_ones_stay_and_the_newcomer_waits() -> None:
    slots = make()
    place(slots, "pinned", pinned=True)
    for name in "ab":
        place(slots, name)
        slots.use(name)
    before = {r.lora_id: (r.row_start, r.num_rows) for r in slots.residents}
    assert not place(slots, "c")
    assert {r.lora_id: (r.row_start, r.num_rows) for r in slots.residents} == before
    slots.release("a")
    assert place(slots, "c")
    assert names(slots) == {"pinned", "b", "c"}


def test_nothing_is_evicted_when_it_would_not_make_room() -> None:
    slots = make(num_slots=4, rows=32, max_rank=32)
    for name in "abc":
        place(slots, name)
    slots.use("b")
    assert not place(slots, "big", rank=24)
    assert names(slots) == {"a", "b", "c"}
    slots.release("b")
    assert place(slots, "big", rank=24)


def test_without_leave_to_evict_only_free_room_is_taken() -> None:
    slots = make(num_slots=1)
    assert place(slots, "a", evict=False)
    assert not place(slots, "b", evict=False)
    assert names(slots) == {"a"}


def test_pins_never_fill_all_slots() -> None:
    slots = make(num_slots=2)
    place(slots, "a", pinned=True)
    with pytest.raises(AdapterError, match="1 of 2 slots are pinned and one must stay free"):
        place(slots, "b", pinned=True)
    assert names(slots) == {"a"}


def test_pins_never_take_the_room_of_the_largest_rank() -> None:
    slots = make(num_slots=4, rows=32, max_rank=16)
    place(slots, "a", pinned=True)
    place(slots, "b", rank=8, pinned=True)
    with pytest.raises(AdapterError, match="no room for an adapter of 16 rows"):
        place(slots, "c", pinned=True)
    assert names(slots) == {"a", "b"}


def test_matrices_of_saved_modules_are_given_and_taken_like_rows() -> None:
    slots = Slots(3, 24, 8, EvictionPolicy.lru, num_matrices=2)
    first = slots.place("a", 8, pinned=False, evict=False, num_matrices=1)
    assert first is not None and first.matrices == (0,)
    assert slots.place("both", 8, pinned=False, evict=False, num_matrices=2) is None
    slots.use("a")
    assert slots.place("both", 8, pinned=False, evict=True, num_matrices=2) is None
    slots.release("a")
    both = slots.place("both", 8, pinned=False, evict=True, num_matrices=2)
    assert both is not None and both.matrices == (0, 1) and names(slots) == {"both"}


def test_several_together_are_judged_by_what_pins_leave() -> None:
    slots = make(num_slots=4, rows=40)
    place(slots, "pinned", rank=8, pinned=True)
    place(slots, "idle", rank=24)
    assert slots.can_hold([16, 16])
    assert not slots.can_hold([16, 17])
    assert not slots.can_hold([8, 8, 8, 8])
    slots.remove_idle()
    assert names(slots) == {"pinned"}
