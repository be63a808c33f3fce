"""Allocation of KV pages: who holds which page. Knows nothing of what pages contain.

Pages are handed out last-freed first, so that a lightly loaded engine touches few of them.
"""

from engine.errors import CapacityError
from engine.memory.kv_pool import KVPool


class PageAllocator:
    """Free list over `num_pages` pages of `page_size` tokens."""

    def __init__(self, kv_pool: KVPool) -> None:
        self.num_pages = kv_pool.num_pages
        self.page_size = kv_pool.page_size
        self._kv_pool = kv_pool
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._held = bytearray(self.num_pages)
        self._dirty = bytearray(self.num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one request need."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, dirty ones zeroed; CapacityError (and nothing taken) if fewer are
        free.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} KV pages were asked for, {len(self._free)} are free")
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        dirty = [page for page in pages if self._dirty[page]]
        if dirty:
            self._kv_pool.zero(dirty)
        for page in pages:
            self._held[page] = 1
            self._dirty[page] = 0
        return pages

    def free(self, pages: list[int], *, dirty: bool = False) -> None:
        """Give pages back. Freeing a page that is not held is a programmer's error.

        `dirty`: an adapter has written them. Whatever numbers it left must not reach the next
        owner, who reads a page to its end and masks what is not its own: 0 x inf is not 0.
        """
        for page in pages:
            assert self._held[page], f"page {page} is freed twice"
            self._held[page] = 0
            self._dirty[page] = dirty
        self._free.extend(reversed(pages))

    def check_integrity(self) -> None:
        """Assert that every page is either free or held, once."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert len(self._free) + sum(self._held) == self.num_pages, "pages were lost"
