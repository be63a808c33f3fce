"""What the launches of an attention kernel share, reserved for the largest batch before the KV pool
is sized. Knows nothing of pages.
"""

from typing import Any

from engine.config import KernelsConfig, KernelSet, MemoryConfig, SchedulerConfig
from engine.device import Device
from engine.memory.ledger import MemoryLedger
from engine.models.decoder import DecoderModel

_LEAST_TABLE_PAGES = 16


def table_pages(num_tokens: int, page_size: int) -> int:
    """Width of a page table for contexts of up to `num_tokens`: a power of two, for it decides how
    rows are split and should seldom change.
    """
    pages = max(_LEAST_TABLE_PAGES, -(-num_tokens // page_size))
    return 1 << (pages - 1).bit_length()


class AttentionSpace:
    """`decode` is the kernel's DecodeWorkspace, None for the plain-torch backend."""

    def __init__(
        self,
        cfg: KernelsConfig,
        limits: SchedulerConfig,
        paging: MemoryConfig,
        model: DecoderModel,
        device: Device,
        ledger: MemoryLedger,
    ) -> None:
        """Reserve and allocate. Raises CapacityError."""
        self.decode: Any = None
        if cfg.attention is KernelSet.reference:
            self.receipt = ledger.reserve("attention", 0, "plain torch shares nothing")
            return
        from engine.kernels import decode_attention as kernel

        kv_heads, head_dim, _ = model.kv_shape
        sizes = {
            "max_rows": limits.max_running_requests,
            "heads": model.num_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "max_tokens": table_pages(model.max_model_len, paging.page_size) * paging.page_size,
            "num_sms": device.num_multiprocessors,
        }
        what = f"partial results of {limits.max_running_requests} rows"
        num_bytes = kernel.decode_workspace_bytes(**sizes)
        self.receipt = ledger.reserve("attention", num_bytes, what)
        self.decode = kernel.decode_workspace(**sizes, device=device.torch_device)
