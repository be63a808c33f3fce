"""Property test of the prefix cache: what is found is what was computed, under the same adapters;
pages are conserved; what is read stays.
"""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.config import MemoryConfig
from engine.errors import CapacityError
from engine.lora.ref import LoRAUse
from engine.memory.pages import PageAllocator
from engine.memory.prefix_cache import CachedPage, Namespace, PrefixCache

SIZE, NUM_PAGES = 2, 10
NAMESPACES: list[Namespace] = [
    (),
    (LoRAUse("a"),),
    (LoRAUse("a", 0.5),),
    (LoRAUse("b"),),
    (LoRAUse("a"), LoRAUse("b")),
]


class Pool:
    num_pages = NUM_PAGES
    page_size = SIZE

    def zero(self, pages: list[int]) -> None:
        pass


class Reader:
    """A request that holds a prefix and pages of its own behind it."""

    def __init__(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        self.namespace = namespace
        self.tokens = list(tokens)
        self.prefix: list[CachedPage] = []


class Caching(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(Pool())  # type: ignore[arg-type]
        self.cache = PrefixCache(MemoryConfig(), self.pages)
        self.readers: list[Reader] = []
        # What each page of the pool was computed from.
        self.contents: dict[int, tuple[Namespace, tuple[int, ...]]] = {}

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    )
    def run(self, namespace: Namespace, tokens: list[int]) -> None:
        """A request is admitted and computes all full pages of its tokens."""
        own = Reader(namespace, tokens)
        own.prefix = self.cache.acquire(namespace, tokens)
        assert len(own.prefix) * SIZE < len(tokens)
        for index, cached in enumerate(own.prefix):
            assert self.contents[cached.page] == (namespace, tuple(tokens[: (index + 1) * SIZE]))
        self.readers.append(own)
        for index in range(len(own.prefix), len(tokens) // SIZE):
            if self.cache.num_available == 0:
                with pytest.raises(CapacityError):
                    self.cache.allocate(1)
                return
            (page,) = self.cache.allocate(1)
            known = tuple(tokens[: (index + 1) * SIZE])
            self.contents[page] = (namespace, known)
            before = own.prefix[-1] if own.prefix else None
            own.prefix.append(self.cache.add(namespace, before, known[-SIZE:], page))
            assert self.contents[own.prefix[-1].page] == (namespace, known)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        own = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.cache.release(own.prefix)

    @rule(lora_id=st.sampled_from(["a", "b"]))
    def forget(self, lora_id: str) -> None:
        """As the manager does it: when no request holds the load."""
        for own in [r for r in self.readers if any(u.lora_id == lora_id for u in r.namespace)]:
            self.readers.remove(own)
            self.cache.release(own.prefix)
        self.cache.drop(lora_id)
        for namespace in NAMESPACES:
            if any(use.lora_id == lora_id for use in namespace):
                assert not self.cache.acquire(namespace, [0] * 9)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def conserved(self) -> None:
        self.pages.check_integrity()
        self.cache.check_integrity([own.prefix for own in self.readers])
        stats = self.cache.stats()
        assert stats.num_cached_pages + self.pages.num_free == NUM_PAGES
        read = {cached for own in self.readers for cached in own.prefix}
        assert self.cache.num_available == NUM_PAGES - len(read)

    def teardown(self) -> None:
        for own in self.readers:
            self.cache.release(own.prefix)
        self.cache.clear()
        assert self.pages.num_free == NUM_PAGES


TestCaching = Caching.TestCase
TestCaching.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_longest_unused_leaf_goes_first_and_its_parent_next() -> None:
    pages = PageAllocator(Pool())  # type: ignore[arg-type]
    cache = PrefixCache(MemoryConfig(), pages)
    for first in (1, 2):
        prefix: list[CachedPage] = []
        for index in range(3):
            tokens = (first, index)
            before = prefix[-1] if prefix else None
            prefix.append(cache.add((), before, tokens, cache.allocate(1)[0]))
        cache.release(prefix)
    cache.release(cache.acquire((), [1, 0, 1, 1, 1, 2, 9]))
    cache.allocate(4 + 2)
    assert len(cache.acquire((), [2, 0, 2, 1, 2, 2, 9])) == 1
    assert len(cache.acquire((), [1, 0, 1, 1, 1, 2, 9])) == 0 + 3
    assert cache.stats().num_evicted_pages == 2


def test_a_page_read_alone_outlives_older_ones_though_another_hung_under_it() -> None:
    pages = PageAllocator(Pool())  # type: ignore[arg-type]
    cache = PrefixCache(MemoryConfig(), pages)
    for tokens in ([(1, 1), (1, 2)], [(2, 1)]):
        prefix: list[CachedPage] = []
        for own in tokens:
            before = prefix[-1] if prefix else None
            prefix.append(cache.add((), before, own, cache.allocate(1)[0]))
        cache.release(prefix)
    cache.release(cache.acquire((), [1, 1, 9]))
    cache.allocate(NUM_PAGES - 1)
    assert len(cache.acquire((), [1, 1, 9])) == 1
    assert cache.stats().num_evicted_pages == 2


def test_a_discarded_prefix_is_forgotten_as_far_as_nobody_else_needs_it() -> None:
    pages = PageAllocator(Pool())  # type: ignore[arg-type]
    cache = PrefixCache(MemoryConfig(), pages)
    held: list[list[CachedPage]] = []
    for last in (3, 4):
        prefix = cache.acquire((), [1, 1, 2, 2, 9])
        for own in [(1, 1), (2, 2), (last, last)][len(prefix) :]:
            before = prefix[-1] if prefix else None
            prefix.append(cache.add((), before, own, cache.allocate(1)[0]))
        held.append(prefix)
    suspect, other = held
    cache.release(other)
    cache.discard(suspect)
    cache.check_integrity([])
    assert len(cache.acquire((), [1, 1, 2, 2, 3, 3, 9])) == 2, "the other's page hangs under these"
    assert cache.stats().num_cached_pages == 3
    assert all(cached.dirty for cached in suspect) and not other[-1].dirty
