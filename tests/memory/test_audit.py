"""The audit: what the allocator holds against receipts and KV, and when it warns."""

from typing import Any

import pytest
from loguru import logger

from engine.memory.audit import MemoryAudit


class Plan:
    held_bytes = 600


class Pool:
    num_bytes = 300


class Card:
    def __init__(self, allocated: int | None) -> None:
        self.allocated = allocated

    def allocated_bytes(self) -> int | None:
        return self.allocated

    def total_bytes(self) -> int:
        return 10_000


@pytest.mark.parametrize(
    ("allocated", "unexplained", "level"),
    [(900, 0, "INFO"), (950, 50, "INFO"), (951, 51, "WARNING"), (840, -60, "WARNING")],
)
def test_difference_is_told_and_warned_of_beyond_half_a_percent(
    allocated: int, unexplained: int, level: str
) -> None:
    told: list[Any] = []
    sink = logger.add(lambda message: told.append(message.record), level="INFO")
    try:
        audit = MemoryAudit(Plan(), Pool(), Card(allocated))  # type: ignore[arg-type]
    finally:
        logger.remove(sink)
    assert audit.unexplained_bytes == unexplained
    assert [record["level"].name for record in told] == [level]


def test_plain_host_memory_is_not_audited() -> None:
    audit = MemoryAudit(Plan(), Pool(), Card(None))  # type: ignore[arg-type]
    assert audit.unexplained_bytes is None
