"""The LoRA manager: adapters by name and by identity, the rank pool, and what a step is bound to.

Public load and unload log start and end with the available device memory and answer a
LoRAUpdateOutput; private ones do the work and raise. One identity (`lora_id`) exists per load. Not
thread-safe: the engine's loop calls it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from engine.config import LoRAConfig
from engine.device import Device
from engine.errors import AdapterError, RequestError
from engine.kernels.lora import LoRAWork
from engine.lora.adapter import AdapterLayout, HostAdapter, LoadReport, Part
from engine.lora.adapter_file import adapter_from_tensors, read_adapter
from engine.lora.base import AdapterBase
from engine.lora.batch import Placement
from engine.lora.binder import StepBinder
from engine.lora.ranges import aligned_rows
from engine.lora.rank_pool import RankPool
from engine.lora.ref import LoRARef, LoRAUpdateOutput, LoRAUse
from engine.lora.slots import Slots
from engine.memory.ledger import MemoryLedger, Receipt, format_bytes
from engine.models.decoder import DecoderModel

DEMO_PREFIX = "demo:"
# Rows beside its ranks that an adapter may need: one of biases, one of DoRA gains.
MAX_VECTOR_ROWS = 2
# Whole matrices that one adapter may bring: embedding and head.
MAX_SAVED_MODULES = 2


@dataclass(slots=True)
class _Loaded:
    """A load: its reference, weights in host memory, where they lie in the pool while they are
    resident, and how many open requests hold it.
    """

    ref: LoRARef
    adapter: HostAdapter
    layout: AdapterLayout
    placement: Placement | None = None
    num_open: int = 0
    retired: bool = False


class LoRAManager:
    """Loads, unloads, activates and binds adapters."""

    def __init__(
        self, cfg: LoRAConfig, model: DecoderModel, device: Device, ledger: MemoryLedger
    ) -> None:
        """Reserve and allocate the pool, then load `lora.adapters`. Raises CapacityError,
        AdapterError.
        """
        self.max_rank = cfg.max_lora_rank
        self.max_loras_per_batch = cfg.max_loras_per_batch
        self._device = device
        num_rows, num_matrices = _pool_rows(cfg), _pool_matrices(cfg, device)
        self._pool = RankPool(model, num_rows, num_matrices, device, ledger)
        self._slots = Slots(
            cfg.max_loras_per_batch,
            num_rows,
            aligned_rows(cfg.max_lora_rank + MAX_VECTOR_ROWS),
            cfg.eviction,
            num_matrices,
        )
        self._base = AdapterBase(model)
        self._binder = StepBinder(device.torch_device, model.dtype)
        self._by_id: dict[str, _Loaded] = {}
        self._by_name: dict[str, str] = {}
        self._num_open_together = 0
        self._forgotten_listeners: list[Callable[[str], None]] = []
        if not device.dry:
            self._load_configured(cfg)

    @property
    def receipt(self) -> Receipt:
        """Proof of the pool's reservation."""
        return self._pool.receipt

    @property
    def pool_bytes_per_row(self) -> int:
        """Bytes that one rank row costs over all layers."""
        return self._pool.bytes_per_row

    # ------------------------------------------------------------------ load, unload, list

    def load_lora_adapter(self, lora_ref: LoRARef, *, replace: bool = False) -> LoRAUpdateOutput:
        """Read the adapter at `lora_ref.path` into host memory and, if a slot is free, into the
        pool.

        With `replace`, a loaded adapter of that name gives way to it at once, or stays if the new
        one is refused; its requests finish with the old weights.
        """
        return self._logged("load", lora_ref, lambda: self._load_lora_adapter(lora_ref, replace))

    def load_lora_adapter_from_tensors(
        self,
        lora_ref: LoRARef,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        *,
        replace: bool = False,
    ) -> LoRAUpdateOutput:
        """Load from tensors by PEFT key and the contents of an adapter_config.json."""
        return self._logged(
            "load from tensors",
            lora_ref,
            lambda: self._load_lora_adapter_from_tensors(lora_ref, tensors, config, replace),
        )

    def unload_lora_adapter(self, lora_ref: LoRARef) -> LoRAUpdateOutput:
        """Forget the adapter; requests that hold it finish with its weights, then its slot is
        free.
        """
        return self._logged("unload", lora_ref, lambda: self._unload_lora_adapter(lora_ref))

    def list_adapters(self) -> tuple[LoRARef, ...]:
        """References of all adapters that requests may name, in the order of loading."""
        return tuple(self._by_id[lora_id].ref for lora_id in self._by_name.values())

    def resolve(self, name: str) -> LoRARef:
        """The current load behind `name`. Raises AdapterError that lists the known names."""
        if name not in self._by_name:
            raise self._unknown(name)
        return self._by_id[self._by_name[name]].ref

    # ------------------------------------------------------------------ life of a request

    def open(self, uses: Sequence[LoRAUse]) -> None:
        """A request will use these loads: their weights stay until `close`. Raises RequestError,
        with nothing opened, if they could never be resident together.
        """
        self._check_together([self._by_id[use.lora_id] for use in uses])
        self._num_open_together += len(uses) > 1
        for use in uses:
            self._by_id[use.lora_id].num_open += 1

    def close(self, uses: Sequence[LoRAUse]) -> None:
        """The request has ended, in whatever way; called exactly once per `open`."""
        self._num_open_together -= len(uses) > 1
        for use in uses:
            loaded = self._by_id[use.lora_id]
            assert loaded.num_open > 0, f"{loaded.ref.name} is closed more often than opened"
            loaded.num_open -= 1
            self._forget_if_unused(loaded)

    def activate(self, uses: Sequence[LoRAUse]) -> bool:
        """Make the adapters resident for one more running request; False, and nothing activated,
        if there is no room for all of them now.
        """
        if self._activate_all(uses):
            return True
        if len(uses) < 2 or any(resident.users for resident in self._slots.residents):
            return False
        # Nobody runs: only idle adapters in between can be in the way of several together.
        self._slots.remove_idle()
        return self._activate_all(uses)

    def _activate_all(self, uses: Sequence[LoRAUse]) -> bool:
        for index, use in enumerate(uses):
            loaded = self._by_id[use.lora_id]
            if self._slots.get(use.lora_id) is None and not self._place(loaded, evict=True):
                self.deactivate(uses[:index])
                return False
            self._slots.use(use.lora_id)
        return True

    def _place(self, loaded: _Loaded, *, evict: bool, pinned: bool = False) -> bool:
        """Give a load its slot and write its weights; False if there is no room now."""
        layout = loaded.layout
        resident = self._slots.place(
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
        self._pool.write(loaded.placement, loaded.adapter)
        return True

    def deactivate(self, uses: Sequence[LoRAUse]) -> None:
        """One running request less."""
        for use in uses:
            self._slots.release(use.lora_id)

    def on_forgotten(self, listener: Callable[[str], None]) -> None:
        """Call `listener(lora_id)` when a load is gone for good: nobody can use it any more."""
        self._forgotten_listeners.append(listener)

    # ------------------------------------------------------------------ a step

    def order(self, uses: Sequence[LoRAUse]) -> int:
        """Sort key of a step's rows: base rows first, then by place in the pool, rows with weights
        or several adapters last.
        """
        if not uses:
            return -1
        place = self._placement(uses[0]).row_start
        return place if len(uses) == 1 and uses[0].weight == 1.0 else place + self._pool.num_rows

    def bind(self, part: Part, rows: Sequence[tuple[Sequence[LoRAUse], int]]) -> LoRAWork | None:
        """Bind a step's rows, (adapters, tokens) each, sorted by `order`, for one part of the
        model; None if no adapter changes it.
        """
        if not any(uses for uses, _ in rows):
            return None
        placed = [
            ([(self._placement(use), use.weight) for use in uses], num_tokens)
            for uses, num_tokens in rows
        ]
        return self._binder.bind(part, placed)

    def _placement(self, use: LoRAUse) -> Placement:
        resident, placement = self._slots.get(use.lora_id), self._by_id[use.lora_id].placement
        assert resident is not None and resident.users > 0, f"{use.lora_id} is not active"
        assert placement is not None
        return placement

    def check_integrity(self) -> None:
        """Assert that slots, ranges and counts agree."""
        taken = self._slots.ranges.taken
        assert taken == {r.row_start: r.num_rows for r in self._slots.residents}
        assert len(self._slots.residents) <= self.max_loras_per_batch
        for resident in self._slots.residents:
            assert resident.users <= self._by_id[resident.lora_id].num_open

    # ------------------------------------------------------------------ private work

    def _logged(
        self, verb: str, ref: LoRARef, work: Callable[[], LoadReport | str]
    ) -> LoRAUpdateOutput:
        available = format_bytes(self._device.available_bytes())
        logger.info(
            "lora {}: {!r} from {} starts, {} available", verb, ref.name, ref.path, available
        )
        error, outcome = "", None
        try:
            outcome = work()
        except AdapterError as refused:
            error = str(refused)
        logger.log(
            "WARNING" if error else "INFO",
            "lora {}: {!r} {}, {} available: {}",
            verb,
            ref.name,
            "refused" if error else "done",
            format_bytes(self._device.available_bytes()),
            error or outcome,
        )
        loaded = {known.name: known.path for known in self.list_adapters()}
        report = outcome if isinstance(outcome, LoadReport) else None
        return LoRAUpdateOutput(not error, error, loaded, report)

    def _load_configured(self, cfg: LoRAConfig) -> None:
        started = time.perf_counter()
        for name, path in cfg.adapters.items():
            self._load_lora_adapter(LoRARef(name, path, pinned=name in cfg.pinned))
        if cfg.adapters:
            logger.info(
                "lora: {} adapters loaded, {} resident in {} slots, {:.1f} s",
                len(cfg.adapters),
                len(self._slots.residents),
                cfg.max_loras_per_batch,
                time.perf_counter() - started,
            )

    def _load_lora_adapter(self, ref: LoRARef, replace: bool = False) -> LoadReport:
        def read() -> HostAdapter:
            return read_adapter(_adapter_directory(ref.path), self._base.targets)

        return self._load(ref, read, replace)

    def _load_lora_adapter_from_tensors(
        self,
        ref: LoRARef,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        replace: bool = False,
    ) -> LoadReport:
        def read() -> HostAdapter:
            return adapter_from_tensors(tensors, config, self._base.targets)

        return self._load(ref, read, replace)

    def _load(self, ref: LoRARef, read: Callable[[], HostAdapter], replace: bool) -> LoadReport:
        """Read, check against the base and register; an AdapterError leaves all as it was."""
        started = time.perf_counter()
        self._check_new(ref, replace)
        adapter = self._base.settle(read())
        self._register(_Loaded(ref, adapter, adapter.layout))
        return adapter.report(time.perf_counter() - started)

    def _unload_lora_adapter(self, ref: LoRARef) -> str:
        loaded = self._by_id.get(ref.lora_id)
        if loaded is None or loaded.retired:
            raise self._unknown(ref.name)
        del self._by_name[ref.name]
        self._retire(loaded)
        return f"{loaded.num_open} requests still use it" if loaded.num_open else "its slot is free"

    def _retire(self, loaded: _Loaded) -> None:
        """No new requests; its weights go with the last one that holds them."""
        loaded.retired = True
        self._forget_if_unused(loaded)

    def _unknown(self, name: str) -> AdapterError:
        known = ", ".join(self._by_name) or "none"
        return AdapterError(f"adapter {name!r} is not loaded; loaded adapters: {known}")

    def _check_new(self, ref: LoRARef, replace: bool) -> None:
        if self.max_loras_per_batch == 0:
            raise AdapterError(
                f"adapter {ref.name!r}: lora.max_loras_per_batch is 0, which turns adapters off"
            )
        if not ref.name.strip():
            raise AdapterError(f"adapter name {ref.name!r} is empty")
        if ref.name in self._by_name and not replace:
            raise AdapterError(
                f"adapter {ref.name!r} is already loaded from {self.resolve(ref.name).path}; "
                "unload it first, or load with replace=true"
            )

    def _check_fits(self, loaded: _Loaded) -> None:
        name, layout = loaded.ref.name, loaded.layout
        if layout.rank > self.max_rank:
            raise AdapterError(
                f"adapter {name!r} has rank {layout.rank}, lora.max_lora_rank is "
                f"{self.max_rank}; raise it"
            )
        if aligned_rows(layout.num_rows) > self._pool.num_rows:
            raise AdapterError(
                f"adapter {name!r} needs {layout.num_rows} rows (ranks, biases, gains), the pool "
                f"has {self._pool.num_rows}; raise lora.pool_rank_rows"
            )
        if len(layout.saved) > self._slots.num_matrices:
            raise AdapterError(
                f"adapter {name!r} replaces {' and '.join(layout.saved)} (modules_to_save), "
                f"lora.saved_modules allows {self._slots.num_matrices} matrices; raise it"
            )
        if layout.saved and loaded.ref.pinned:
            raise AdapterError(
                f"adapter {name!r} has modules_to_save and cannot be pinned; load it unpinned"
            )

    def _check_together(self, loads: Sequence[_Loaded]) -> None:
        """Raise RequestError if a request's loads could never be resident at the same time."""
        if len(loads) < 2:
            return
        rows = [loaded.layout.num_rows for loaded in loads if not self._is_pinned(loaded)]
        num_matrices = sum(len(loaded.layout.saved) for loaded in loads)
        if not self._slots.can_hold(rows) or num_matrices > self._slots.num_matrices:
            names = ", ".join(loaded.ref.name for loaded in loads)
            raise RequestError(
                f"adapters {names} do not fit together: {len(loads)} slots, {sum(rows)} unpinned "
                f"rows and {num_matrices} matrices of saved modules are needed, there are "
                f"{self._slots.num_slots}, {self._pool.num_rows} and {self._slots.num_matrices} "
                "less those of pinned adapters"
            )

    def _is_pinned(self, loaded: _Loaded) -> bool:
        resident = self._slots.get(loaded.ref.lora_id)
        return resident is not None and resident.pinned

    def _register(self, loaded: _Loaded) -> None:
        """Make the load known under its name; one of that name that was there is retired."""
        self._check_fits(loaded)
        ref = loaded.ref
        old = self._by_id[self._by_name[ref.name]] if ref.name in self._by_name else None
        if ref.pinned:
            self._pin(loaded, old)
        else:
            self._place(loaded, evict=False)
        self._by_id[ref.lora_id] = loaded
        self._by_name[ref.name] = ref.lora_id
        if old is not None:
            self._retire(old)

    def _pin(self, loaded: _Loaded, old: _Loaded | None) -> None:
        """Place a pinned load, in the stead of `old` if that is pinned too. Raises AdapterError."""
        if self._num_open_together:
            raise AdapterError(
                f"adapter {loaded.ref.name!r} cannot be pinned while requests with several "
                "adapters are open; try again later"
            )
        was_pinned = old is not None and self._slots.set_pinned(old.ref.lora_id, False)
        try:
            if not self._place(loaded, evict=True, pinned=True):
                raise AdapterError(
                    f"adapter {loaded.ref.name!r} cannot be pinned now: running requests hold the "
                    "slots; try again later"
                )
        except AdapterError:
            if old is not None and was_pinned and not self._slots.set_pinned(old.ref.lora_id, True):
                self._place(old, evict=True, pinned=True)
            raise

    def _forget_if_unused(self, loaded: _Loaded) -> None:
        if not loaded.retired or loaded.num_open:
            return
        if self._slots.get(loaded.ref.lora_id) is not None:
            self._slots.remove(loaded.ref.lora_id)
        del self._by_id[loaded.ref.lora_id]
        for listener in self._forgotten_listeners:
            listener(loaded.ref.lora_id)


def _pool_rows(cfg: LoRAConfig) -> int:
    """Rows of the pool: as configured, else 16 a slot and at least one adapter of the largest
    rank.
    """
    if cfg.max_loras_per_batch == 0:
        return 0
    rows = cfg.pool_rank_rows
    if rows is None:
        rows = max(cfg.max_lora_rank + MAX_VECTOR_ROWS, 16 * cfg.max_loras_per_batch)
    return aligned_rows(rows)


def _pool_matrices(cfg: LoRAConfig, device: Device) -> int:
    """Matrices of saved modules: as configured, else those of one adapter in host memory (which is
    committed when it is first written) and none elsewhere.
    """
    if cfg.max_loras_per_batch == 0:
        return 0
    if cfg.saved_modules is not None:
        return cfg.saved_modules
    return MAX_SAVED_MODULES if device.host_visible else 0


def _adapter_directory(path: str) -> Path:
    if path.startswith(DEMO_PREFIX):
        return Path(str(resources.files("engine.lora") / "demo" / path.removeprefix(DEMO_PREFIX)))
    return Path(path).expanduser()
