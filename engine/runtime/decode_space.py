"""What all decode graphs share: their static inputs and the tables of adapters, reserved before the
KV pool is sized. Knows nothing of pages or requests.
"""

from typing import Any

from engine.config import (
    GraphConfig,
    GraphMode,
    KernelsConfig,
    KernelSet,
    MemoryConfig,
    SchedulerConfig,
)
from engine.device import Device
from engine.errors import ConfigError
from engine.lora.manager import LoRAManager
from engine.memory.ledger import MemoryLedger
from engine.models.decoder import DecoderModel
from engine.runtime.attention_space import table_pages
from engine.runtime.decode_inputs import DecodeInputs


class DecodeSpace:
    """`batch_sizes` to capture, ascending, none if graphs are off; the largest batch's `inputs`;
    `lora`, its GraphBatch, is None without adapters or graphs.
    """

    def __init__(
        self,
        cfg: GraphConfig,
        kernels: KernelsConfig,
        limits: SchedulerConfig,
        paging: MemoryConfig,
        model: DecoderModel,
        lora_manager: LoRAManager,
        device: Device,
        ledger: MemoryLedger,
    ) -> None:
        """Reserve and allocate. Raises ConfigError, CapacityError."""
        self.batch_sizes = _batch_sizes(cfg, limits.max_running_requests)
        if self.batch_sizes:
            _check_kernels(kernels)
        max_rows = max(self.batch_sizes, default=0)
        max_pages = table_pages(model.max_model_len, paging.page_size)
        shape = (max_rows, max_pages, model.spec.hidden_size, model.dtype)
        num_bytes = DecodeInputs.num_bytes(*shape) + lora_manager.graph_batch_bytes(max_rows)
        what = f"inputs of decode graphs of up to {max_rows} rows"
        self.receipt = ledger.reserve("decode_space", num_bytes, what)
        self.inputs = DecodeInputs(*shape, device.torch_device)
        self.lora: Any = lora_manager.new_graph_batch(max_rows)


def _batch_sizes(cfg: GraphConfig, max_rows: int) -> tuple[int, ...]:
    """The configured sizes, none larger than the largest batch."""
    if cfg.mode is GraphMode.off:
        return ()
    return tuple(sorted({min(size, max_rows) for size in cfg.batch_sizes}))


def _check_kernels(kernels: KernelsConfig) -> None:
    for key, chosen in (("ops", kernels.ops), ("attention", kernels.attention)):
        if chosen is not KernelSet.triton:
            raise ConfigError(
                f"graph.mode: got decode with kernels.{key}={chosen.value}, whose steps cannot be "
                "captured; use kernels=triton or graph=off"
            )
