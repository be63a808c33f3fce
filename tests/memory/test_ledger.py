"""The ledger and the plan: reservations, the budget, the seal."""

import pytest

from engine.config import DeviceConfig, MemoryConfig
from engine.device import Device
from engine.errors import CapacityError, WiringError
from engine.memory.ledger import MemoryLedger, format_bytes
from engine.memory.plan import MemoryPlan


def make_ledger(total: int = 1000, fraction: float = 0.5) -> MemoryLedger:
    return MemoryLedger(MemoryConfig(fraction=fraction), Device(DeviceConfig(memory_bytes=total)))


def test_plan_holds_all_receipts_and_what_is_left() -> None:
    ledger = make_ledger()
    receipts = [ledger.reserve("model", 100, "weights"), ledger.reserve("lora_manager", 50, "pool")]
    plan = MemoryPlan.build(ledger, receipts)
    assert plan.receipts == tuple(receipts)
    assert (plan.budget_bytes, plan.reserved_bytes, plan.kv_bytes) == (500, 150, 350)
    table = plan.render(320, "20 tokens")
    assert "model" in table and "20 tokens" in table and "30 B" in table


def test_transient_bytes_are_reserved_but_not_held() -> None:
    ledger = make_ledger()
    model = ledger.reserve("model", 100, "weights")
    step = ledger.reserve("workspace", 50, "one step", transient=True)
    plan = MemoryPlan.build(ledger, [model, step])
    assert (plan.reserved_bytes, plan.held_bytes, plan.kv_bytes) == (150, 100, 350)


def test_more_than_the_budget_is_refused_with_both_numbers_and_changes_nothing() -> None:
    ledger = make_ledger()
    ledger.reserve("model", 400, "weights")
    with pytest.raises(
        CapacityError, match=r"lora_manager needs 101 B \(pool\), 100 B of the budget of 500 B"
    ):
        ledger.reserve("lora_manager", 101, "pool")
    assert ledger.left_bytes == 100
    assert ledger.reserve("lora_manager", 100, "pool").num_bytes == 100


def test_reserving_after_the_seal_names_both_components() -> None:
    ledger = make_ledger()
    MemoryPlan.build(ledger, [ledger.reserve("model", 1, "weights")])
    with pytest.raises(
        WiringError, match=r"late_buffers: reserves 8 B .* after memory_plan sealed"
    ):
        ledger.reserve("late_buffers", 8, "graph buffers")


def test_sealing_without_a_receipt_names_its_owner() -> None:
    ledger = make_ledger()
    model = ledger.reserve("model", 1, "weights")
    ledger.reserve("lora_manager", 1, "pool")
    with pytest.raises(WiringError, match="without the receipts of lora_manager"):
        MemoryPlan.build(ledger, [model])


def test_a_receipt_of_a_second_ledger_is_refused() -> None:
    first, second = make_ledger(), make_ledger()
    own = first.reserve("model", 1, "weights")
    foreign = second.reserve("lora_manager", 1, "pool")
    with pytest.raises(WiringError, match="receipts of lora_manager from another ledger"):
        MemoryPlan.build(first, [own, foreign])


def test_sealing_twice_is_refused() -> None:
    ledger = make_ledger()
    MemoryPlan.build(ledger, [])
    with pytest.raises(WiringError, match="seals a ledger that memory_plan has sealed"):
        MemoryPlan.build(ledger, [])


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3072.0 GiB",
    ]  # fmt: skip
