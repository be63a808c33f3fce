"""Property test of the page allocator: pages are conserved and never given to two."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.errors import CapacityError
from engine.memory.pages import PageAllocator


class Pool:
    num_pages = 12
    page_size = 4


class Pages(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(Pool())  # type: ignore[arg-type]
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_free
        if count > free:
            with pytest.raises(
                CapacityError, match=f"{count} KV pages were asked for, {free} are free"
            ):
                self.allocator.allocate(count)
            assert self.allocator.num_free == free
            return
        pages = self.allocator.allocate(count)
        assert len(pages) == count
        self.owned.append(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.owned:
            self.allocator.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @invariant()
    def conserved(self) -> None:
        held = [page for pages in self.owned for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(Pool.num_pages))
        assert len(held) + self.allocator.num_free == Pool.num_pages
        self.allocator.check_integrity()


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_pages_for_rounds_up_and_double_free_is_a_bug() -> None:
    allocator = PageAllocator(Pool())  # type: ignore[arg-type]
    assert [allocator.pages_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages)
    assert allocator.allocate(2) == pages, "last freed pages come first, in order"
