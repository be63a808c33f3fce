"""Residency: which adapters hold a slot and a row range of the pool, and who must go when another
comes.

Adapters with running requests and pinned ones are never evicted. Knows identities (`lora_id`), no
names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EvictionPolicy
from engine.errors import AdapterError
from engine.lora.ranges import RankRanges, aligned_rows


@dataclass(slots=True)
class Resident:
    """An adapter in the pool: `row_start` and `num_rows` of its range, the matrices of its saved
    modules, `users` = running requests. While `loading` it is neither used nor evicted.
    """

    lora_id: str
    row_start: int
    num_rows: int
    matrices: tuple[int, ...]
    pinned: bool
    loaded_at: int
    used_at: int
    users: int = 0
    loading: bool = False

    @property
    def evictable(self) -> bool:
        return self.users == 0 and not self.pinned and not self.loading


class Slots:
    """At most `num_slots` residents over `num_rows` rows and `num_matrices` matrices.

    `max_rows` are those that an adapter of the largest rank may need; rows are given out in
    multiples of `row_alignment`.
    """

    def __init__(
        self,
        num_slots: int,
        num_rows: int,
        max_rows: int,
        policy: EvictionPolicy,
        num_matrices: int = 0,
        row_alignment: int = 8,
    ) -> None:
        self.num_slots = num_slots
        self.max_rows = max_rows
        self.policy = policy
        self.ranges = RankRanges(num_rows)
        self.num_matrices = num_matrices
        self._row_alignment = row_alignment
        self._residents: dict[str, Resident] = {}
        self._clock = 0
        self.num_evictions = 0

    @property
    def residents(self) -> tuple[Resident, ...]:
        return tuple(self._residents.values())

    def aligned_rows(self, num_rows: int) -> int:
        """Rows that an adapter of `num_rows` ranks and vectors occupies."""
        return aligned_rows(num_rows, self._row_alignment)

    def get(self, lora_id: str) -> Resident | None:
        return self._residents.get(lora_id)

    def check_pin(self) -> None:
        """Raise AdapterError if one more pinned adapter would leave no slot for the others."""
        num_pinned = sum(resident.pinned for resident in self._residents.values())
        if num_pinned + 1 >= self.num_slots:
            raise AdapterError(
                f"pinned: {num_pinned} of {self.num_slots} slots are pinned and one must stay "
                "free for "
                "the others; unload a pinned adapter or raise lora.max_loras_per_batch"
            )

    def place(
        self, lora_id: str, num_rows: int, *, pinned: bool, evict: bool, num_matrices: int = 0
    ) -> Resident | None:
        """Give `lora_id` a slot, a range of at least `num_rows` rows and matrices, evicting idle
        adapters if allowed; None if there is no room now.

        Their contents are stale until written. Nothing is evicted when that would not make enough
        room. Raises AdapterError, with nothing placed, if pinning it could leave other adapters
        without room for ever.
        """
        assert lora_id not in self._residents
        if pinned:
            self.check_pin()
        num_rows = self.aligned_rows(num_rows)
        victims = self._victims(num_rows, num_matrices, evict)
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        start = self.ranges.take(num_rows)
        assert start is not None, "victims did not make room"
        now = self._tick()
        matrices = tuple(self._free_matrices()[:num_matrices])
        resident = Resident(lora_id, start, num_rows, matrices, pinned, loaded_at=now, used_at=now)
        self._residents[lora_id] = resident
        if pinned and not self.can_hold([self.max_rows]):
            self.remove(lora_id)
            raise AdapterError(
                f"pinned: rows {start} to {start + num_rows} of {self.ranges.num_rows} would leave "
                f"no room for an adapter of {self.max_rows} rows; raise lora.pool_rank_rows or "
                "lower lora.max_lora_rank"
            )
        return resident

    def can_hold(self, rows: Sequence[int]) -> bool:
        """Whether adapters of so many rows each could be resident together, the pinned ones
        staying and everybody else gone.
        """
        pinned = [resident for resident in self._residents.values() if resident.pinned]
        if len(pinned) + len(rows) > self.num_slots:
            return False
        ranges = RankRanges(self.ranges.num_rows)
        for resident in pinned:
            ranges.take_at(resident.row_start, resident.num_rows)
        return all(ranges.take(self.aligned_rows(own)) is not None for own in rows)

    def remove(self, lora_id: str) -> None:
        """Free slot and range of an adapter that nobody uses."""
        resident = self._residents.pop(lora_id)
        assert resident.users == 0, f"{lora_id} is removed while {resident.users} requests use it"
        self.ranges.give_back(resident.row_start)

    def remove_idle(self) -> None:
        """Free slots and ranges of all adapters that are neither used nor pinned nor loading."""
        for resident in self.residents:
            if resident.evictable:
                self._evict(resident)

    def set_pinned(self, lora_id: str, pinned: bool) -> bool:
        """Pin or unpin a resident adapter; False if it is not resident or was so already."""
        resident = self._residents.get(lora_id)
        if resident is None or resident.pinned == pinned:
            return False
        resident.pinned = pinned
        return True

    def use(self, lora_id: str) -> None:
        """One more running request."""
        resident = self._residents[lora_id]
        resident.users += 1
        resident.used_at = self._tick()

    def release(self, lora_id: str) -> Resident:
        """One running request less."""
        resident = self._residents[lora_id]
        assert resident.users > 0, f"{lora_id} is released more often than used"
        resident.users -= 1
        return resident

    def _evict(self, resident: Resident) -> None:
        self.remove(resident.lora_id)
        self.num_evictions += 1

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _free_matrices(self) -> list[int]:
        taken = {index for own in self._residents.values() for index in own.matrices}
        return [index for index in range(self.num_matrices) if index not in taken]

    def _victims(self, num_rows: int, num_matrices: int, evict: bool) -> list[Resident] | None:
        """The shortest prefix of the eviction order whose removal makes room, or None."""
        idle = [r for r in self._residents.values() if evict and r.evictable]
        by_use = self.policy is EvictionPolicy.lru
        idle.sort(key=lambda r: r.used_at if by_use else r.loaded_at)
        num_free = len(self._free_matrices())
        for count in range(len(idle) + 1):
            victims = idle[:count]
            if len(self._residents) - count >= self.num_slots:
                continue
            if num_free + sum(len(victim.matrices) for victim in victims) < num_matrices:
                continue
            if self.ranges.find(num_rows, frozenset(r.row_start for r in victims)) is not None:
                return victims
        return None
