"""Which loads lie in the rank pool: slots and pool together, and what may be there with what.

A load that does not fit alone, or adapters of one request that could never be there together, are
refused; whoever is only in the way waits or is evicted. Knows nothing of names or files.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import LoRAConfig
from engine.device import Device
from engine.errors import AdapterError, RequestError
from engine.lora.adapter import AdapterLayout, HostAdapter, Part
from engine.lora.batch import Placement
from engine.lora.pool_copies import Arrival
from engine.lora.pool_image import PoolImage
from engine.lora.ranges import aligned_rows
from engine.lora.rank_pool import RankPool
from engine.lora.ref import LoRARef
from engine.lora.slots import Resident, Slots
from engine.memory.ledger import MemoryLedger
from engine.models.decoder import DecoderModel

# Rows beside its ranks that an adapter may need: one of biases, one of DoRA gains.
MAX_VECTOR_ROWS = 2
# Whole matrices that one adapter may bring: embedding and head.
MAX_SAVED_MODULES = 2


@dataclass(slots=True)
class Loaded:
    """A load: its reference, weights in host memory, where they lie in the pool while they are
    resident and when they have arrived there, and how many open requests hold it.
    """

    ref: LoRARef
    image: PoolImage
    placement: Placement | None = None
    arrival: Arrival | None = None
    placed_at: float = 0.0
    num_open: int = 0
    retired: bool = False

    @property
    def layout(self) -> AdapterLayout:
        return self.image.layout


@dataclass(frozen=True, slots=True)
class PoolTraffic:
    """Since the start: adapters that arrived in the pool, seconds that they were on their way, and
    adapters that gave way to others.
    """

    num_loads: int
    load_seconds: float
    num_evictions: int


class Residency:
    """The pool and its slots; loads are given as `Loaded`, in the order of a request's adapters."""

    def __init__(
        self, cfg: LoRAConfig, model: DecoderModel, device: Device, ledger: MemoryLedger
    ) -> None:
        """Reserve and allocate the pool. Raises CapacityError."""
        self.max_rank = cfg.max_lora_rank
        alignment = model.ops.row_alignment
        num_rows, num_matrices = _pool_rows(cfg, alignment), _pool_matrices(cfg, device)
        self._arriving: list[Loaded] = []
        self._num_loads, self._load_seconds = 0, 0.0
        self.pool = RankPool(model, num_rows, num_matrices, device, ledger)
        self.slots = Slots(
            cfg.max_loras_per_batch,
            num_rows,
            aligned_rows(cfg.max_lora_rank + MAX_VECTOR_ROWS, alignment),
            cfg.eviction,
            num_matrices,
            alignment,
        )

    @property
    def residents(self) -> tuple[Resident, ...]:
        return self.slots.residents

    @property
    def traffic(self) -> PoolTraffic:
        return PoolTraffic(self._num_loads, self._load_seconds, self.slots.num_evictions)

    def placement(self, loaded: Loaded) -> Placement:
        """Where an active load lies."""
        resident = self.slots.get(loaded.ref.lora_id)
        assert resident is not None and resident.users > 0, f"{loaded.ref.name} is not active"
        assert loaded.placement is not None
        return loaded.placement

    def place(self, loaded: Loaded, *, evict: bool, pinned: bool = False) -> bool:
        """Give a load its slot and write its weights; False if there is no room now. Raises
        AdapterError if it is pinned and must not be.
        """
        layout = loaded.layout
        resident = self.slots.place(
            loaded.ref.lora_id,
            layout.num_rows,
            pinned=pinned,
            evict=evict,
            num_matrices=len(layout.saved),
        )
        if resident is None:
            return False
        rows = resident.row_start, resident.row_start + resident.num_rows
        loaded.placement = Placement(layout, *rows, resident.matrices)
        loaded.placed_at = time.perf_counter()
        loaded.arrival = self.pool.write(loaded.placement, loaded.image)
        resident.loading = True
        self._arriving.append(loaded)
        self._note_arrivals()
        return True

    def image(self, adapter: HostAdapter) -> PoolImage:
        """The adapter as `place` takes it; any thread may make it."""
        return self.pool.image(adapter, self.slots.aligned_rows(adapter.layout.num_rows))

    def pin(self, loaded: Loaded, old: Loaded | None) -> None:
        """Place a pinned load, in the stead of `old` if that is pinned too. Raises AdapterError,
        with `old` as it was.
        """
        was_pinned = old is not None and self.slots.set_pinned(old.ref.lora_id, False)
        try:
            if not self.place(loaded, evict=True, pinned=True):
                raise AdapterError(
                    f"adapter {loaded.ref.name!r} cannot be pinned now: running requests hold the "
                    "slots; try again later"
                )
        except AdapterError:
            if old is not None and was_pinned and not self.slots.set_pinned(old.ref.lora_id, True):
                self.place(old, evict=True, pinned=True)
            raise

    def activate(self, loads: Sequence[Loaded]) -> bool:
        """Make the loads resident for one more running request; False, and nothing activated, if
        there is no room for all of them now.
        """
        if self._activate_all(loads):
            return True
        if len(loads) < 2 or any(resident.users for resident in self.residents):
            return False
        # Nobody runs: only idle adapters in between can be in the way of several together.
        self.slots.remove_idle()
        return self._activate_all(loads)

    def deactivate(self, loads: Sequence[Loaded]) -> None:
        """One running request less."""
        for loaded in loads:
            self.slots.release(loaded.ref.lora_id)

    def remove(self, loaded: Loaded) -> None:
        """Free what a load that nobody uses has in the pool."""
        if self.slots.get(loaded.ref.lora_id) is not None:
            self.slots.remove(loaded.ref.lora_id)

    def check_fits(self, ref: LoRARef, layout: AdapterLayout) -> None:
        """Raise AdapterError if such a load could never be resident."""
        name = ref.name
        if layout.rank > self.max_rank:
            raise AdapterError(
                f"adapter {name!r} has rank {layout.rank}, lora.max_lora_rank is "
                f"{self.max_rank}; raise it"
            )
        if self.slots.aligned_rows(layout.num_rows) > self.pool.num_rows:
            raise AdapterError(
                f"adapter {name!r} needs {layout.num_rows} rows (ranks, biases, gains), the pool "
                f"has {self.pool.num_rows}; raise lora.pool_rank_rows"
            )
        if len(layout.saved) > self.slots.num_matrices:
            raise AdapterError(
                f"adapter {name!r} replaces {' and '.join(layout.saved)} (modules_to_save), "
                f"lora.saved_modules allows {self.slots.num_matrices} matrices; raise it"
            )
        if layout.saved and ref.pinned:
            raise AdapterError(
                f"adapter {name!r} has modules_to_save and cannot be pinned; load it unpinned"
            )

    def check_together(self, loads: Sequence[Loaded]) -> None:
        """Raise RequestError if a request's loads could never be resident at the same time."""
        if len(loads) < 2:
            return
        rows = [loaded.layout.num_rows for loaded in loads if not self._is_pinned(loaded)]
        num_matrices = sum(len(loaded.layout.saved) for loaded in loads)
        if not self.slots.can_hold(rows) or num_matrices > self.slots.num_matrices:
            names = ", ".join(loaded.ref.name for loaded in loads)
            raise RequestError(
                f"adapters {names} do not fit together: {len(loads)} slots, {sum(rows)} unpinned "
                f"rows and {num_matrices} matrices of saved modules are needed, there are "
                f"{self.slots.num_slots}, {self.pool.num_rows} and {self.slots.num_matrices} "
                "less those of pinned adapters"
            )

    def full_rows(self, num_tokens: int) -> list[tuple[list[tuple[Placement, float]], int]]:
        """Rows of as many adapters of the largest rank as fit, in equal shares of `num_tokens`; as
        the binder takes them.
        """
        rows = min(self.max_rank, self.pool.num_rows)
        step = self.slots.aligned_rows(rows)
        count = min(self.slots.num_slots, self.pool.num_rows // step if step else 0, num_tokens)
        layout = AdapterLayout(rows, None, None, frozenset(Part), ())
        places = [Placement(layout, index * step, (index + 1) * step) for index in range(count)]
        ends = [num_tokens * (index + 1) // count for index in range(count)]
        starts = [0, *ends][:count]
        return [
            ([(place, 1.0)], stop - start)
            for place, start, stop in zip(places, starts, ends, strict=True)
        ]

    def check_integrity(self) -> None:
        """Assert that slots and ranges agree."""
        taken = self.slots.ranges.taken
        assert taken == {r.row_start: r.num_rows for r in self.residents}
        assert len(self.residents) <= self.slots.num_slots

    def _activate_all(self, loads: Sequence[Loaded]) -> bool:
        self._note_arrivals()
        for index, loaded in enumerate(loads):
            if not self._is_ready(loaded):
                self.deactivate(loads[:index])
                return False
            self.slots.use(loaded.ref.lora_id)
        return True

    def _is_ready(self, loaded: Loaded) -> bool:
        """Whether the load's weights are in the pool; if there is room they are on their way."""
        lora_id = loaded.ref.lora_id
        if self.slots.get(lora_id) is None and not self.place(loaded, evict=True):
            return False
        resident = self.slots.get(lora_id)
        return resident is not None and not resident.loading

    def _note_arrivals(self) -> None:
        under_way = []
        for loaded in self._arriving:
            resident = self.slots.get(loaded.ref.lora_id)
            if resident is None:
                continue
            if loaded.arrival is None or loaded.arrival.done:
                resident.loading = False
                self._num_loads += 1
                self._load_seconds += time.perf_counter() - loaded.placed_at
            else:
                under_way.append(loaded)
        self._arriving = under_way

    def _is_pinned(self, loaded: Loaded) -> bool:
        resident = self.slots.get(loaded.ref.lora_id)
        return resident is not None and resident.pinned


def _pool_rows(cfg: LoRAConfig, alignment: int) -> int:
    """Rows of the pool: as configured, else 16 a slot and at least one adapter of the largest
    rank.
    """
    if cfg.max_loras_per_batch == 0:
        return 0
    rows = cfg.pool_rank_rows
    if rows is None:
        rows = max(cfg.max_lora_rank + MAX_VECTOR_ROWS, 16 * cfg.max_loras_per_batch)
    return aligned_rows(rows, alignment)


def _pool_matrices(cfg: LoRAConfig, device: Device) -> int:
    """Matrices of saved modules: as configured, else those of one adapter in host memory (which is
    committed when it is first written) and none elsewhere.
    """
    if cfg.max_loras_per_batch == 0:
        return 0
    if cfg.saved_modules is not None:
        return cfg.saved_modules
    return MAX_SAVED_MODULES if device.host_visible else 0
