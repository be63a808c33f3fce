"""The prefix cache: full KV pages kept by what they were computed from, and by which adapters.

A tree of pages for each namespace, which is a request's adapters (loads and weights, () for the
base model): a page hangs under the page of the tokens before it and is found by its own tokens. So
equality is of tokens, never of hashes alone, and nothing that a user can send reaches another
namespace. A page is free, a request's own, or cached with a count of the running requests that read
it; cached pages that nobody reads give way, longest unread first.
"""

from collections import OrderedDict
from dataclasses import dataclass

from engine.config import MemoryConfig
from engine.lora.ref import LoRAUse
from engine.memory.pages import PageAllocator

Namespace = tuple[LoRAUse, ...]


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Since the start: prompt tokens looked up and found, pages evicted; and pages cached now."""

    num_queried_tokens: int
    num_hit_tokens: int
    num_evicted_pages: int
    num_cached_pages: int

    @property
    def hit_rate(self) -> float:
        """Share of looked up tokens that were found; 0 before the first."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


class CachedPage:
    """A node of the tree; a root has no page. `num_readers` running requests hold it. `dirty`: it
    may hold any numbers, and is zeroed before anybody else owns it.
    """

    __slots__ = ("children", "dirty", "namespace", "num_readers", "page", "parent", "tokens")

    def __init__(
        self,
        namespace: Namespace,
        page: int,
        tokens: tuple[int, ...],
        parent: "CachedPage | None",
    ) -> None:
        self.namespace = namespace
        self.page = page
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, ...], CachedPage] = {}
        self.num_readers = 0
        self.dirty = bool(namespace)


class PrefixCache:
    """Finds, keeps and gives up pages. Requests hold what they read by `CachedPage`s, in order."""

    def __init__(self, cfg: MemoryConfig, pages: PageAllocator) -> None:
        self.enabled = cfg.prefix_cache
        self._pages = pages
        self._page_size = pages.page_size
        self._roots: dict[Namespace, CachedPage] = {}
        # Pages that nobody reads, longest unread first. Who reads a page reads all before it, and
        # lets them go last to first, so that a page stands after all that hang under it.
        self._unread: OrderedDict[CachedPage, None] = OrderedDict()
        self._num_cached = 0
        self._num_queried = self._num_hit = self._num_evicted = 0

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones and cached ones that nobody reads."""
        return self._pages.num_free + len(self._unread)

    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(
            self._num_queried, self._num_hit, self._num_evicted, self._num_cached
        )

    def acquire(self, namespace: Namespace, token_ids: list[int]) -> list[CachedPage]:
        """The longest cached prefix of `token_ids`, held for a reader. It never covers the last
        token: one at least must be computed for there to be logits.
        """
        node = self._roots.get(namespace)
        found: list[CachedPage] = []
        size = self._page_size
        for start in range(0, len(token_ids) - size, size):
            if node is None:
                break
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is not None:
                found.append(node)
        for own in found:
            self._hold(own)
        return found

    def count(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Book a look-up that led to an admission."""
        self._num_queried += num_queried_tokens
        self._num_hit += num_hit_tokens

    def add(
        self,
        namespace: Namespace,
        before: CachedPage | None,
        tokens: tuple[int, ...],
        page: int,
    ) -> CachedPage:
        """Keep a request's full and computed `page` behind the page `before` (None: the first),
        and hold it for that request. If these tokens are cached there already, that page is held in
        its stead and `page` is freed.
        """
        parent = before
        if parent is None:
            parent = self._roots.setdefault(namespace, CachedPage(namespace, -1, (), None))
        node = parent.children.get(tokens)
        if node is not None:
            self._pages.free([page], dirty=bool(namespace))
        else:
            node = CachedPage(namespace, page, tokens, parent)
            parent.children[tokens] = node
            self._num_cached += 1
        self._hold(node)
        return node

    def release(self, held: list[CachedPage]) -> None:
        """One reader less for each page of a prefix."""
        for node in reversed(held):
            node.num_readers -= 1
            assert node.num_readers >= 0, "a cached page is released more often than held"
            if not node.num_readers:
                self._unread[node] = None

    def discard(self, held: list[CachedPage]) -> None:
        """Release a prefix that is not to be trusted: its pages are dirty, and forgotten as far as
        nobody else reads them or hangs under them.
        """
        self.release(held)
        for node in held:
            node.dirty = True
        for node in reversed(held):
            if node.num_readers or node.children:
                break
            self._forget(node)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, giving up cached ones as needed. Raises CapacityError."""
        missing = count - self._pages.num_free
        if missing > len(self._unread):
            return self._pages.allocate(count)
        for _ in range(max(0, missing)):
            self._evict()
        return self._pages.allocate(count)

    def drop(self, lora_id: str) -> None:
        """Forget all that was computed with a load that no request holds any more."""
        for namespace in [own for own in self._roots if any(u.lora_id == lora_id for u in own)]:
            for node in _nodes(self._roots.pop(namespace)):
                assert not node.num_readers, "a load is forgotten while its pages are read"
                del self._unread[node]
                self._free(node)

    def clear(self) -> None:
        """Forget all that nobody reads."""
        while self._unread:
            self._evict()

    def check_integrity(self, held: list[list[CachedPage]]) -> None:
        """Assert that counts agree with the prefixes that running requests hold."""
        readers: dict[CachedPage, int] = {}
        for prefix in held:
            for node in prefix:
                readers[node] = readers.get(node, 0) + 1
        nodes = [node for root in self._roots.values() for node in _nodes(root)]
        assert all(node.num_readers == readers.pop(node, 0) for node in nodes)
        assert not readers, "a page is read that is not in the tree"
        assert len({node.page for node in nodes}) == len(nodes) == self._num_cached
        assert set(self._unread) == {node for node in nodes if not node.num_readers}
        place = {node: index for index, node in enumerate(self._unread)}
        below = [(own, node) for node in self._unread for own in node.children.values()]
        assert all(place[own] < place[node] for own, node in below), "parents go last"

    # ------------------------------------------------------------------ private work

    def _hold(self, node: CachedPage) -> None:
        if not node.num_readers:
            self._unread.pop(node, None)
        node.num_readers += 1

    def _evict(self) -> None:
        """Give up the page that is unread for longest."""
        self._forget(next(iter(self._unread)))
        self._num_evicted += 1

    def _forget(self, node: CachedPage) -> None:
        """Take a page that nobody reads and that has none under it out of the tree."""
        parent = node.parent
        assert parent is not None and not node.children and not node.num_readers
        del self._unread[node]
        del parent.children[node.tokens]
        if parent.parent is None and not parent.children:
            del self._roots[node.namespace]
        self._free(node)

    def _free(self, node: CachedPage) -> None:
        self._num_cached -= 1
        self._pages.free([node.page], dirty=node.dirty)


def _nodes(root: CachedPage) -> list[CachedPage]:
    """All pages of a tree."""
    stack, found = list(root.children.values()), []
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found
