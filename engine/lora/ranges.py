"""Row ranges of the rank pool: who may write where. Knows no tensors."""


def aligned_rows(num_rows: int, alignment: int) -> int:
    """`num_rows`, rounded up to a multiple of `alignment`."""
    return -(-num_rows // alignment) * alignment


class RankRanges:
    """First-fit allocator of row ranges. Knows starts and lengths, not tensors."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._lengths: dict[int, int] = {}

    def find(self, length: int, without: frozenset[int] = frozenset()) -> int | None:
        """Start of the first free run of `length` rows, as if the ranges at `without` were free; or
        None.
        """
        position = 0
        for start in sorted(self._lengths):
            if start in without:
                continue
            if start - position >= length:
                return position
            position = start + self._lengths[start]
        return position if self.num_rows - position >= length else None

    def take(self, length: int) -> int | None:
        """Own the first free run of `length` rows (>= 1); None and nothing taken if there is
        none.
        """
        assert length >= 1
        start = self.find(length)
        if start is not None:
            self._lengths[start] = length
        return start

    def take_at(self, start: int, length: int) -> None:
        """Own the rows from `start` on, which must be free."""
        self._lengths[start] = length

    def give_back(self, start: int) -> None:
        """Free the range that begins at `start`."""
        del self._lengths[start]

    @property
    def taken(self) -> dict[int, int]:
        """Start to length of every range in use."""
        return dict(self._lengths)
