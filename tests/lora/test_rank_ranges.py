"""Property test of the rank-range allocator: ranges never overlap or move and are conserved."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.lora.ranges import RankRanges, aligned_rows

ROWS = 64


class Ranges(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranges = RankRanges(ROWS)
        self.owned: dict[int, int] = {}

    def free_runs(self, without: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
        """(start, length) of the maximal free runs, by brute force."""
        used = [False] * ROWS
        for start, length in self.owned.items():
            if start not in without:
                used[start : start + length] = [True] * length
        runs, start = [], None
        for row, taken in enumerate([*used, True]):
            if not taken and start is None:
                start = row
            elif taken and start is not None:
                runs.append((start, row - start))
                start = None
        return runs

    @rule(length=st.integers(1, ROWS + 1))
    def take(self, length: int) -> None:
        fitting = [start for start, run in self.free_runs() if run >= length]
        start = self.ranges.take(length)
        assert start == (fitting[0] if fitting else None), "first fit"
        if start is not None:
            self.owned[start] = length

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.owned:
            start = data.draw(st.sampled_from(sorted(self.owned)))
            self.ranges.give_back(start)
            del self.owned[start]

    @rule(data=st.data(), length=st.integers(1, ROWS))
    def find_as_if_some_were_free(self, data: st.DataObject, length: int) -> None:
        without = (
            frozenset(data.draw(st.sets(st.sampled_from(sorted(self.owned)))))
            if self.owned
            else frozenset()
        )
        fitting = [start for start, run in self.free_runs(without) if run >= length]
        assert self.ranges.find(length, without) == (fitting[0] if fitting else None)

    @invariant()
    def never_moved(self) -> None:
        assert self.ranges.taken == self.owned


TestRanges = Ranges.TestCase
TestRanges.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_alignment() -> None:
    assert [aligned_rows(rank, 8) for rank in (1, 8, 9, 64)] == [8, 8, 16, 64]
    assert [aligned_rows(rank, 16) for rank in (1, 16, 17)] == [16, 16, 32]
