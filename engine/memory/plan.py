"""The sealed memory plan: all receipts, and the bytes that are left for KV pages.

Building it is the moment after which nobody may reserve device memory.
"""

from dataclasses import dataclass

from engine.memory.ledger import MemoryLedger, Receipt, format_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What each component holds and what KV may take, in bytes."""

    receipts: tuple[Receipt, ...]
    budget_bytes: int
    total_bytes: int

    @classmethod
    def build(cls, ledger: MemoryLedger, receipts: list[Receipt]) -> "MemoryPlan":
        """Seal `ledger`, which must have handed out exactly `receipts` (else WiringError)."""
        ledger.seal("memory_plan", tuple(receipts))
        return cls(ledger.receipts, ledger.budget_bytes, ledger.total_bytes)

    @property
    def reserved_bytes(self) -> int:
        return sum(receipt.num_bytes for receipt in self.receipts)

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between steps, KV apart."""
        return sum(receipt.num_bytes for receipt in self.receipts if not receipt.transient)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV pool may take."""
        return self.budget_bytes - self.reserved_bytes

    def render(self, kv_used_bytes: int, kv_what: str) -> str:
        """The ledger as a table: one line a receipt that holds something, then the KV pool and what
        stays free.
        """
        rows = [(r.owner, r.num_bytes, r.what) for r in self.receipts if r.num_bytes]
        rows.append(("kv_pool", kv_used_bytes, kv_what))
        unused = self.budget_bytes - self.reserved_bytes - kv_used_bytes
        rows.append(("unused", unused, "left of the budget"))
        rows.append(
            ("budget", self.budget_bytes, f"of {format_bytes(self.total_bytes)} on the device")
        )
        width = max(len(owner) for owner, _, _ in rows)
        lines = [
            f"  {owner:<{width}}  {format_bytes(size):>10}  {size / self.budget_bytes:6.1%}  {what}"
            for owner, size, what in rows
        ]
        return "\n".join(["memory plan", *lines])
