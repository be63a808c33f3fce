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
from engine.errors import AdapterError
from engine.lora.adapter import HostAdapter, LoRATarget
from engine.lora.adapter_file import adapter_from_tensors, read_adapter
from engine.lora.batch import LoRABatch, Segment
from engine.lora.rank_pool import RankPool, aligned_rank
from engine.lora.ref import LoRARef, LoRAUpdateOutput
from engine.lora.slots import Slots
from engine.memory.ledger import MemoryLedger, Receipt, format_bytes
from engine.models.decoder import DecoderModel

DEMO_PREFIX = "demo:"


@dataclass(slots=True)
class _Loaded:
    """A load: its reference, weights in host memory and how many open requests hold it."""

    ref: LoRARef
    adapter: HostAdapter
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
        num_rows = _pool_rows(cfg)
        self._pool = RankPool(model, num_rows, device, ledger)
        self._slots = Slots(cfg.max_loras_per_batch, num_rows, cfg.max_lora_rank, cfg.eviction)
        self._targets = {
            member.name: LoRATarget(member.name, linear.total_in_features, member.width)
            for linear in model.linears()
            for member in linear.members
        }
        self._by_id: dict[str, _Loaded] = {}
        self._by_name: dict[str, str] = {}
        self._bound: tuple[tuple[Segment, ...], LoRABatch] | None = None
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

    def load_lora_adapter(self, lora_ref: LoRARef) -> LoRAUpdateOutput:
        """Read the adapter at `lora_ref.path` into host memory and, if a slot is free, into the
        pool.
        """
        return self._logged("load", lora_ref, lambda: self._load_lora_adapter(lora_ref))

    def load_lora_adapter_from_tensors(
        self, lora_ref: LoRARef, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> LoRAUpdateOutput:
        """Load from tensors by PEFT key and the contents of an adapter_config.json."""
        return self._logged(
            "load from tensors",
            lora_ref,
            lambda: self._load_lora_adapter_from_tensors(lora_ref, tensors, config),
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

    def open(self, lora_id: str) -> None:
        """A request will use this load: its weights stay until `close`."""
        self._by_id[lora_id].num_open += 1

    def close(self, lora_id: str) -> None:
        """The request has ended, in whatever way; called exactly once per `open`."""
        loaded = self._by_id[lora_id]
        assert loaded.num_open > 0, f"{loaded.ref.name} is closed more often than opened"
        loaded.num_open -= 1
        self._forget_if_unused(loaded)

    def activate(self, lora_id: str) -> bool:
        """Make the adapter resident for one more running request; False if there is no room now."""
        loaded = self._by_id[lora_id]
        resident = self._slots.get(lora_id)
        if resident is None:
            resident = self._slots.place(lora_id, loaded.adapter.rank, pinned=False, evict=True)
            if resident is None:
                return False
            self._pool.write(resident.row_start, resident.num_rows, loaded.adapter)
        self._slots.use(resident)
        return True

    def deactivate(self, lora_id: str) -> None:
        """One running request less."""
        self._slots.release(lora_id)

    # ------------------------------------------------------------------ a step

    def order(self, lora_id: str | None) -> int:
        """Sort key of a step's rows: base rows first, then by place in the pool."""
        if lora_id is None:
            return -1
        resident = self._slots.get(lora_id)
        assert resident is not None, f"{lora_id} runs without a slot"
        return resident.row_start

    def bind(self, rows: Sequence[tuple[str | None, int]]) -> LoRABatch | None:
        """Bind a step's rows, (lora_id, tokens) each, sorted by `order`; None for base only.

        Steps with the same segments share one batch, so that decoding binds once and not per token.
        """
        segments: list[Segment] = []
        token = 0
        for lora_id, num_tokens in rows:
            start, token = token, token + num_tokens
            if lora_id is None:
                continue
            resident = self._slots.get(lora_id)
            assert resident is not None and resident.users > 0, f"{lora_id} is bound but not active"
            row_stop = resident.row_start + resident.num_rows
            if segments and segments[-1].row_start == resident.row_start:
                start = segments.pop().start
            segments.append(Segment(start, token, resident.row_start, row_stop))
        key = tuple(segments)
        if not key:
            return None
        if self._bound is None or self._bound[0] != key:
            self._bound = (key, LoRABatch.bind(key, self._device.torch_device))
        return self._bound[1]

    def check_integrity(self) -> None:
        """Assert that slots, ranges and counts agree."""
        taken = self._slots.ranges.taken
        assert taken == {r.row_start: r.num_rows for r in self._slots.residents}
        assert len(self._slots.residents) <= self.max_loras_per_batch
        for resident in self._slots.residents:
            assert resident.users <= self._by_id[resident.lora_id].num_open

    # ------------------------------------------------------------------ private work

    def _logged(self, verb: str, ref: LoRARef, work: Callable[[], str]) -> LoRAUpdateOutput:
        available = format_bytes(self._device.available_bytes())
        logger.info(
            "lora {}: {!r} from {} starts, {} available", verb, ref.name, ref.path, available
        )
        started = time.perf_counter()
        error = ""
        try:
            outcome = work()
        except AdapterError as refused:
            error = outcome = str(refused)
        available = format_bytes(self._device.available_bytes())
        seconds = time.perf_counter() - started
        logger.log(
            "WARNING" if error else "INFO",
            "lora {}: {!r} {} in {:.2f} s, {} available: {}",
            verb,
            ref.name,
            "refused" if error else "done",
            seconds,
            available,
            outcome,
        )
        loaded = {known.name: known.path for known in self.list_adapters()}
        return LoRAUpdateOutput(not error, error, loaded)

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

    def _load_lora_adapter(self, ref: LoRARef) -> str:
        self._check_new(ref)
        adapter = read_adapter(_adapter_directory(ref.path), self._targets)
        self._register(ref, adapter)
        return adapter.describe()

    def _load_lora_adapter_from_tensors(
        self, ref: LoRARef, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> str:
        self._check_new(ref)
        adapter = adapter_from_tensors(tensors, config, self._targets)
        self._register(ref, adapter)
        return adapter.describe()

    def _unload_lora_adapter(self, ref: LoRARef) -> str:
        loaded = self._by_id.get(ref.lora_id)
        if loaded is None or loaded.retired:
            raise self._unknown(ref.name)
        loaded.retired = True
        del self._by_name[ref.name]
        self._forget_if_unused(loaded)
        return f"{loaded.num_open} requests still use it" if loaded.num_open else "its slot is free"

    def _unknown(self, name: str) -> AdapterError:
        known = ", ".join(self._by_name) or "none"
        return AdapterError(f"adapter {name!r} is not loaded; loaded adapters: {known}")

    def _check_new(self, ref: LoRARef) -> None:
        if self.max_loras_per_batch == 0:
            raise AdapterError(
                f"adapter {ref.name!r}: lora.max_loras_per_batch is 0, which turns adapters off"
            )
        if not ref.name.strip():
            raise AdapterError(f"adapter name {ref.name!r} is empty")
        if ref.name in self._by_name:
            raise AdapterError(
                f"adapter {ref.name!r} is already loaded from {self.resolve(ref.name).path}; "
                "unload it first"
            )

    def _register(self, ref: LoRARef, adapter: HostAdapter) -> None:
        if adapter.rank > self.max_rank:
            raise AdapterError(
                f"adapter {ref.name!r} has rank {adapter.rank}, lora.max_lora_rank is "
                f"{self.max_rank}; raise it"
            )
        resident = self._slots.place(ref.lora_id, adapter.rank, pinned=ref.pinned, evict=ref.pinned)
        if resident is None and ref.pinned:
            raise AdapterError(
                f"adapter {ref.name!r} cannot be pinned now: running requests hold the slots; "
                "try again later"
            )
        self._by_id[ref.lora_id] = _Loaded(ref, adapter)
        self._by_name[ref.name] = ref.lora_id
        if resident is not None:
            self._pool.write(resident.row_start, resident.num_rows, adapter)

    def _forget_if_unused(self, loaded: _Loaded) -> None:
        if not loaded.retired or loaded.num_open:
            return
        if self._slots.get(loaded.ref.lora_id) is not None:
            self._slots.remove(loaded.ref.lora_id)
        del self._by_id[loaded.ref.lora_id]


def _pool_rows(cfg: LoRAConfig) -> int:
    """Rows of the pool: as configured, else 16 a slot and at least one adapter of the largest
    rank.
    """
    if cfg.max_loras_per_batch == 0:
        return 0
    rows = cfg.pool_rank_rows
    if rows is None:
        rows = max(cfg.max_lora_rank, 16 * cfg.max_loras_per_batch)
    return aligned_rank(rows)


def _adapter_directory(path: str) -> Path:
    if path.startswith(DEMO_PREFIX):
        return Path(str(resources.files("engine.lora") / "demo" / path.removeprefix(DEMO_PREFIX)))
    return Path(path).expanduser()
