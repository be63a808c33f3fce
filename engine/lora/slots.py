"""Residency: which adapters hold a slot and a row range of the pool, and who must go when another
comes.

Adapters with running requests and pinned ones are never evicted. Knows identities (`lora_id`), no
names.
"""

from dataclasses import dataclass

from engine.config import EvictionPolicy
from engine.errors import AdapterError
from engine.lora.rank_pool import RankRanges, aligned_rank


@dataclass(slots=True)
class Resident:
    """An adapter in the pool: `row_start` and `num_rows` of its range, `users` = running
    requests.
    """

    lora_id: str
    row_start: int
    num_rows: int
    pinned: bool
    loaded_at: int
    used_at: int
    users: int = 0


class Slots:
    """At most `num_slots` residents over `num_rows` rows."""

    def __init__(
        self, num_slots: int, num_rows: int, max_rank: int, policy: EvictionPolicy
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.policy = policy
        self.ranges = RankRanges(num_rows)
        self._residents: dict[str, Resident] = {}
        self._clock = 0

    @property
    def residents(self) -> tuple[Resident, ...]:
        return tuple(self._residents.values())

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

    def place(self, lora_id: str, rank: int, *, pinned: bool, evict: bool) -> Resident | None:
        """Give `lora_id` a slot and a range, evicting idle adapters if allowed; None if there is no
        room now.

        The range's contents are stale until written. Nothing is evicted when that would not make
        enough room. Raises AdapterError, with nothing placed, if pinning it could leave other
        adapters without room for ever.
        """
        assert lora_id not in self._residents
        if pinned:
            self.check_pin()
        num_rows = aligned_rank(rank)
        victims = self._victims(num_rows) if evict else self._no_victims(num_rows)
        if victims is None:
            return None
        for victim in victims:
            self.remove(victim.lora_id)
        start = self.ranges.take(num_rows)
        assert start is not None, "victims did not make room"
        now = self._tick()
        resident = Resident(lora_id, start, num_rows, pinned, loaded_at=now, used_at=now)
        self._residents[lora_id] = resident
        if pinned and not self._largest_rank_fits():
            self.remove(lora_id)
            raise AdapterError(
                f"pinned: rows {start} to {start + num_rows} of {self.ranges.num_rows} would "
                "leave no "
                f"room for an adapter of rank {self.max_rank}; raise lora.pool_rank_rows or lower "
                "lora.max_lora_rank"
            )
        return resident

    def _largest_rank_fits(self) -> bool:
        """Whether an adapter of the largest rank would fit if every unpinned one left."""
        unpinned = frozenset(r.row_start for r in self._residents.values() if not r.pinned)
        return self.ranges.find(aligned_rank(self.max_rank), unpinned) is not None

    def remove(self, lora_id: str) -> None:
        """Free slot and range of an adapter that nobody uses."""
        resident = self._residents.pop(lora_id)
        assert resident.users == 0, f"{lora_id} is removed while {resident.users} requests use it"
        self.ranges.give_back(resident.row_start)

    def use(self, resident: Resident) -> None:
        """One more running request."""
        resident.users += 1
        resident.used_at = self._tick()

    def release(self, lora_id: str) -> Resident:
        """One running request less."""
        resident = self._residents[lora_id]
        assert resident.users > 0, f"{lora_id} is released more often than used"
        resident.users -= 1
        return resident

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _no_victims(self, num_rows: int) -> list[Resident] | None:
        room = len(self._residents) < self.num_slots and self.ranges.find(num_rows) is not None
        return [] if room else None

    def _victims(self, num_rows: int) -> list[Resident] | None:
        """The shortest prefix of the eviction order whose removal makes room, or None."""
        idle = [r for r in self._residents.values() if r.users == 0 and not r.pinned]
        by_use = self.policy is EvictionPolicy.lru
        idle.sort(key=lambda r: r.used_at if by_use else r.loaded_at)
        for count in range(len(idle) + 1):
            victims = idle[:count]
            if len(self._residents) - count >= self.num_slots:
                continue
            if self.ranges.find(num_rows, frozenset(r.row_start for r in victims)) is not None:
                return victims
        return None
