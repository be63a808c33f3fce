"""The memory ledger: who reserved how many bytes of the device, and when no more may be reserved.

Knows nothing of tensors. Components take the ledger, reserve, and keep the receipt; the plan seals
it.
"""

import threading
from dataclasses import dataclass

from engine.config import MemoryConfig
from engine.device import Device
from engine.errors import CapacityError, WiringError


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of one reservation: `owner` may use `num_bytes` of the device for `what`.

    Transient bytes are not allocated between steps: they are free again, or lie in the private
    pool of captured graphs. The others are held for good.
    """

    owner: str
    num_bytes: int
    what: str
    transient: bool = False


class MemoryLedger:
    """Collects receipts against a budget in bytes until it is sealed."""

    def __init__(self, cfg: MemoryConfig, device: Device) -> None:
        wanted = int(device.total_bytes() * cfg.fraction)
        self.budget_bytes = min(wanted, device.available_bytes())
        self.total_bytes = device.total_bytes()
        self._receipts: list[Receipt] = []
        self._sealed_by: str | None = None
        self._lock = threading.Lock()

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """All receipts in the order of the reservations."""
        return tuple(self._receipts)

    @property
    def reserved_bytes(self) -> int:
        return sum(receipt.num_bytes for receipt in self._receipts)

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget that nobody has reserved."""
        return self.budget_bytes - self.reserved_bytes

    def reserve(self, owner: str, num_bytes: int, what: str, *, transient: bool = False) -> Receipt:
        """Book `num_bytes` (>= 0) for `owner`, before allocating them.

        Raises WiringError after the seal and CapacityError if the budget does not hold them; both
        change nothing.
        """
        assert num_bytes >= 0, f"{owner} reserves {num_bytes} bytes"
        with self._lock:
            if self._sealed_by is not None:
                raise WiringError(
                    f"{owner}: reserves {format_bytes(num_bytes)} ({what}) after "
                    f"{self._sealed_by} sealed the "
                    f"ledger; wire {owner} so that {self._sealed_by} needs its receipt"
                )
            if num_bytes > self.left_bytes:
                raise CapacityError(self._shortage(owner, num_bytes, what))
            receipt = Receipt(owner, num_bytes, what, transient)
            self._receipts.append(receipt)
            return receipt

    def seal(self, by: str, receipts: tuple[Receipt, ...]) -> None:
        """Close the ledger; `receipts` must be exactly those handed out, else WiringError names the
        owners.
        """
        with self._lock:
            if self._sealed_by is not None:
                raise WiringError(f"{by}: seals a ledger that {self._sealed_by} has sealed")
            handed_out = {id(receipt) for receipt in self._receipts}
            shown = {id(receipt) for receipt in receipts}
            missing = [r.owner for r in self._receipts if id(r) not in shown]
            foreign = [r.owner for r in receipts if id(r) not in handed_out]
            if missing:
                raise WiringError(
                    f"{by}: seals the ledger without the receipts of {', '.join(missing)}; add "
                    "them to its receipts"
                )
            if foreign:
                raise WiringError(
                    f"{by}: was given receipts of {', '.join(foreign)} from another ledger; "
                    "wire one ledger to all"
                )
            self._sealed_by = by

    def _shortage(self, owner: str, num_bytes: int, what: str) -> str:
        held = (
            ", ".join(f"{r.owner} {format_bytes(r.num_bytes)}" for r in self._receipts) or "nothing"
        )
        return (
            f"{owner} needs {format_bytes(num_bytes)} ({what}), "
            f"{format_bytes(self.left_bytes)} of the budget of "
            f"{format_bytes(self.budget_bytes)} are left (held: {held}); raise memory.fraction or "
            "device.memory_bytes, or make the model, lora.pool_rank_rows or "
            "scheduler.max_step_tokens smaller"
        )


def format_bytes(num_bytes: int) -> str:
    """Human-readable bytes in binary units: 1536 -> '1.5 KiB'."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
