"""The audit at the end of a start: what the ledger says against what the device's allocator holds.

Unexplained bytes are a defect, not a margin: they are logged as a warning. Devices without an
allocator to ask (plain host memory) are not audited.
"""

from loguru import logger

from engine.device import Device
from engine.memory.kv_pool import KVPool
from engine.memory.ledger import format_bytes
from engine.memory.plan import MemoryPlan

TOLERATED_SHARE = 0.005


class MemoryAudit:
    """Compares once, when it is built. `unexplained_bytes` is None where there is nothing to
    ask.
    """

    def __init__(self, plan: MemoryPlan, kv_pool: KVPool, device: Device) -> None:
        explained = plan.held_bytes + kv_pool.num_bytes
        allocated = device.allocated_bytes()
        self.unexplained_bytes = None if allocated is None else allocated - explained
        if self.unexplained_bytes is None:
            return
        message = "memory audit: allocator holds {}, receipts and KV explain {}, difference {}"
        tolerated = device.total_bytes() * TOLERATED_SHARE
        level = "WARNING" if abs(self.unexplained_bytes) > tolerated else "INFO"
        logger.log(
            level,
            message,
            format_bytes(allocated or 0),
            format_bytes(explained),
            format_bytes(self.unexplained_bytes),
        )
