"""What the launches of an attention kernel share, reserved for the largest batch before the KV pool
is sized. Knows nothing of pages.
"""

from typing import Any

from engine.config import KernelsConfig, KernelSet, SchedulerConfig
from engine.device import Device
from engine.memory.ledger import MemoryLedger
from engine.models.decoder import DecoderModel

# Multiprocessors of an H200, for plans made where no card can be asked.
_NUM_SMS = 132


class AttentionSpace:
    """`decode` is the kernel's DecodeWorkspace, None for the plain-torch backend."""

    def __init__(
        self,
        cfg: KernelsConfig,
        limits: SchedulerConfig,
        model: DecoderModel,
        device: Device,
        ledger: MemoryLedger,
    ) -> None:
        """Reserve and allocate. Raises ConfigError if the kernels cannot run, CapacityError."""
        self.decode: Any = None
        if cfg.attention is KernelSet.reference:
            self.receipt = ledger.reserve("attention", 0, "plain torch shares nothing")
            return
        device.check_triton("kernels.attention")
        from engine.kernels import decode_attention as kernel

        kv_heads, head_dim, _ = model.kv_shape
        on_card = not device.dry and not device.host_visible
        num_sms = kernel.count_sms(device.torch_device) if on_card else _NUM_SMS
        sizes = {
            "max_rows": limits.max_running_requests,
            "heads": model.num_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "max_tokens": 2 * model.max_model_len,  # page tables are padded to a power of two
            "num_sms": num_sms,
        }
        what = f"partial results of {limits.max_running_requests} rows"
        num_bytes = kernel.decode_workspace_bytes(**sizes)
        self.receipt = ledger.reserve("attention", num_bytes, what)
        self.decode = kernel.decode_workspace(**sizes, device=device.torch_device)
