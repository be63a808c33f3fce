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
from engine.lora.adapter import HostAdapter, LoadReport, Part
from engine.lora.adapter_file import adapter_from_tensors, read_adapter
from engine.lora.base import AdapterBase
from engine.lora.binder import Row, StepBinder, portions_of
from engine.lora.pool_image import PoolImage
from engine.lora.ref import LoRARef, LoRAStatus, LoRAUpdateOutput, LoRAUse
from engine.lora.residency import Loaded, PoolTraffic, Residency
from engine.lora.slots import Resident
from engine.memory.ledger import MemoryLedger, Receipt, format_bytes
from engine.models.decoder import DecoderModel

DEMO_PREFIX = "demo:"


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read and checked: all that a load needs."""

    image: PoolImage
    report: LoadReport


class LoRAManager:
    """Loads, unloads, activates and binds adapters."""

    def __init__(
        self, cfg: LoRAConfig, model: DecoderModel, device: Device, ledger: MemoryLedger
    ) -> None:
        """Reserve and allocate the pool, then load `lora.adapters`. Raises CapacityError,
        AdapterError.
        """
        self.max_loras_per_batch = cfg.max_loras_per_batch
        self._device = device
        self._residency = Residency(cfg, model, device, ledger)
        self._base = AdapterBase(model)
        self._binder = StepBinder(model, device)
        self._by_id: dict[str, Loaded] = {}
        self._by_name: dict[str, str] = {}
        self._num_open_together = 0
        self._forgotten_listeners: list[Callable[[str], None]] = []
        if not device.dry:
            self._load_configured(cfg)

    @property
    def receipt(self) -> Receipt:
        """Proof of the pool's reservation."""
        return self._residency.pool.receipt

    @property
    def pool_bytes_per_row(self) -> int:
        """Bytes that one rank row costs over all layers."""
        return self._residency.pool.bytes_per_row

    @property
    def residents(self) -> tuple[Resident, ...]:
        """Adapters in the pool now."""
        return self._residency.residents

    @property
    def traffic(self) -> PoolTraffic:
        """What went to the pool and had to leave it."""
        return self._residency.traffic

    # ------------------------------------------------------------------ load, unload, list

    def read_lora_adapter(self, lora_ref: LoRARef) -> ReadAdapter:
        """Read and check the adapter at `lora_ref.path`, for a load to come; any thread may do so
        while the engine runs. Raises AdapterError.
        """
        directory, targets = _adapter_directory(lora_ref.path), self._base.targets
        return self._read(lora_ref, lambda: read_adapter(directory, targets))

    def read_lora_adapter_from_tensors(
        self, lora_ref: LoRARef, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> ReadAdapter:
        """Check tensors in the same way, on any thread. Raises AdapterError."""
        targets = self._base.targets
        return self._read(lora_ref, lambda: adapter_from_tensors(tensors, config, targets))

    def load_lora_adapter(
        self, lora_ref: LoRARef, *, replace: bool = False, read: ReadAdapter | None = None
    ) -> LoRAUpdateOutput:
        """Read the adapter at `lora_ref.path` into host memory and, if a slot is free, into the
        pool.

        With `replace`, a loaded adapter of that name gives way to it at once, or stays if the new
        one is refused; its requests finish with the old weights. `read`: what was read before.
        """

        def load() -> LoadReport:
            return self._load_lora_adapter(lora_ref, replace, read)

        return self._logged("load", lora_ref, load)

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

    def statuses(self) -> tuple[LoRAStatus, ...]:
        """The same, as they stand."""
        residents = {own.lora_id for own in self.residents}
        loads = [self._by_id[lora_id] for lora_id in self._by_name.values()]
        return tuple(
            LoRAStatus(own.ref, own.layout.rank, own.ref.lora_id in residents, own.num_open)
            for own in loads
        )

    def name(self, use: LoRAUse) -> str:
        """What a load was called when the request that uses it began."""
        return self._by_id[use.lora_id].ref.name

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
        self._residency.check_together(self._loads(uses))
        self._num_open_together += len(uses) > 1
        for loaded in self._loads(uses):
            loaded.num_open += 1

    def close(self, uses: Sequence[LoRAUse]) -> None:
        """The request has ended, in whatever way; called exactly once per `open`."""
        self._num_open_together -= len(uses) > 1
        for loaded in self._loads(uses):
            assert loaded.num_open > 0, f"{loaded.ref.name} is closed more often than opened"
            loaded.num_open -= 1
            self._forget_if_unused(loaded)

    def activate(self, uses: Sequence[LoRAUse]) -> bool:
        """Make the adapters resident for one more running request; False, and nothing activated,
        if there is no room for all of them now.
        """
        return self._residency.activate(self._loads(uses))

    def deactivate(self, uses: Sequence[LoRAUse]) -> None:
        """One running request less."""
        self._residency.deactivate(self._loads(uses))

    def on_forgotten(self, listener: Callable[[str], None]) -> None:
        """Call `listener(lora_id)` when a load is gone for good: nobody can use it any more."""
        self._forgotten_listeners.append(listener)

    # ------------------------------------------------------------------ a step

    def bind(self, part: Part, rows: Sequence[tuple[Sequence[LoRAUse], int]]) -> Any:
        """Bind a step's rows, (adapters, tokens) each, for one part of the model: what its layers
        take, None if no adapter changes it.
        """
        if not any(uses for uses, _ in rows):
            return None
        return self._binder.bind(part, self._placed(rows))

    def bind_full(self, part: Part, num_tokens: int) -> Any:
        """What `bind` gives where the most adapters of the largest rank share `num_tokens`."""
        portions = portions_of(self._residency.full_rows(num_tokens))
        return self._binder.make(part, portions, num_tokens)

    def graph_uses(self, rows: Sequence[Sequence[LoRAUse]]) -> list[Any]:
        """What a GraphBatch takes for the adapters of rows of one token each."""
        if not any(rows):
            return []
        return self._binder.layer_uses(self._placed([(uses, 1) for uses in rows]))

    def new_graph_batch(self, max_tokens: int) -> Any:
        """A GraphBatch for decode graphs of up to `max_tokens`; None without adapters or graphs."""
        if not self.max_loras_per_batch or not max_tokens:
            return None
        return self._binder.tables.new_graph_batch(max_tokens, self._residency.max_rank)

    def graph_batch_bytes(self, max_tokens: int) -> int:
        """Device bytes of `new_graph_batch`."""
        if not self.max_loras_per_batch or not max_tokens:
            return 0
        num_bytes: int = self._binder.tables.graph_batch_bytes(max_tokens, self._residency.max_rank)
        return num_bytes

    def check_integrity(self) -> None:
        """Assert that slots, ranges and counts agree."""
        self._residency.check_integrity()
        for resident in self.residents:
            assert resident.users <= self._by_id[resident.lora_id].num_open

    # ------------------------------------------------------------------ private work

    def _placed(self, rows: Sequence[tuple[Sequence[LoRAUse], int]]) -> list[Row]:
        return [
            ([(self._residency.placement(self._by_id[u.lora_id]), u.weight) for u in uses], count)
            for uses, count in rows
        ]

    def _loads(self, uses: Sequence[LoRAUse]) -> list[Loaded]:
        return [self._by_id[use.lora_id] for use in uses]

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
                len(self.residents),
                cfg.max_loras_per_batch,
                time.perf_counter() - started,
            )

    def _load_lora_adapter(
        self, ref: LoRARef, replace: bool = False, read: ReadAdapter | None = None
    ) -> LoadReport:
        return self._load(ref, lambda: read or self.read_lora_adapter(ref), replace)

    def _load_lora_adapter_from_tensors(
        self,
        ref: LoRARef,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        replace: bool = False,
    ) -> LoadReport:
        def read() -> ReadAdapter:
            return self.read_lora_adapter_from_tensors(ref, tensors, config)

        return self._load(ref, read, replace)

    def _load(self, ref: LoRARef, read: Callable[[], ReadAdapter], replace: bool) -> LoadReport:
        """Read and register; an AdapterError leaves all as it was."""
        self._check_new(ref, replace)
        own = read()
        self._register(Loaded(ref, own.image))
        return own.report

    def _read(self, ref: LoRARef, make: Callable[[], HostAdapter]) -> ReadAdapter:
        """Make it, check it against the base and lay it out for the pool."""
        started = time.perf_counter()
        settled = self._base.settle(make())
        self._residency.check_fits(ref, settled.layout)
        image = self._residency.image(settled)
        return ReadAdapter(image, settled.report(time.perf_counter() - started))

    def _unload_lora_adapter(self, ref: LoRARef) -> str:
        loaded = self._by_id.get(ref.lora_id)
        if loaded is None or loaded.retired:
            raise self._unknown(ref.name)
        del self._by_name[ref.name]
        self._retire(loaded)
        return f"{loaded.num_open} requests still use it" if loaded.num_open else "its slot is free"

    def _retire(self, loaded: Loaded) -> None:
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

    def _register(self, loaded: Loaded) -> None:
        """Make the load known under its name; one of that name that was there is retired."""
        ref = loaded.ref
        old = self._by_id[self._by_name[ref.name]] if ref.name in self._by_name else None
        if ref.pinned and self._num_open_together:
            raise AdapterError(
                f"adapter {ref.name!r} cannot be pinned while requests with several adapters are "
                "open; try again later"
            )
        if ref.pinned:
            self._residency.pin(loaded, old)
        else:
            self._residency.place(loaded, evict=False)
        self._by_id[ref.lora_id] = loaded
        self._by_name[ref.name] = ref.lora_id
        if old is not None:
            self._retire(old)

    def _forget_if_unused(self, loaded: Loaded) -> None:
        if not loaded.retired or loaded.num_open:
            return
        self._residency.remove(loaded)
        del self._by_id[loaded.ref.lora_id]
        for listener in self._forgotten_listeners:
            listener(loaded.ref.lora_id)


def _adapter_directory(path: str) -> Path:
    if path.startswith(DEMO_PREFIX):
        return Path(str(resources.files("engine.lora") / "demo" / path.removeprefix(DEMO_PREFIX)))
    return Path(path).expanduser()
