"""What the engine process tells of its engine: facts of the start, loaded adapters, counts.

Reads the engine and changes nothing.
"""

import os
from collections.abc import Iterable

from engine.device import Device
from engine.lora.ref import LoRAStatus
from engine.runtime.request import Request
from engine.server.messages import AdapterInfo, EngineInfo, EngineStats, LedgerLine
from engine.serving.engine import Engine


def engine_info(engine: Engine, model_name: str, device: Device) -> EngineInfo:
    plan = engine.kv_pool.plan
    return EngineInfo(
        pid=os.getpid(),
        model=model_name,
        max_model_len=engine.model.max_model_len,
        vocab_size=engine.model.spec.vocab_size,
        dtype=str(engine.model.dtype).removeprefix("torch."),
        device=str(device.torch_device),
        max_adapter_slots=engine.lora_manager.max_loras_per_batch,
        ledger=[LedgerLine(r.owner, r.num_bytes, r.what, r.transient) for r in plan.receipts],
        kv_bytes=engine.kv_pool.num_bytes,
        budget_bytes=plan.budget_bytes,
        total_bytes=plan.total_bytes,
    )


def adapter_infos(engine: Engine) -> list[AdapterInfo]:
    """All adapters that requests may name."""
    return [_adapter_info(status) for status in engine.lora_manager.statuses()]


def engine_stats(engine: Engine) -> EngineStats:
    scheduler, pool, manager = engine.scheduler, engine.kv_pool, engine.lora_manager
    num_free_pages = scheduler.prefix_cache.num_available
    traffic, throughput = manager.traffic, engine.throughput
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_kv_tokens=pool.num_tokens,
        num_kv_tokens_used=pool.num_tokens - num_free_pages * pool.page_size,
        num_adapter_slots=manager.max_loras_per_batch,
        num_adapters_resident=len(manager.residents),
        running_adapters=_adapter_names(engine, scheduler.running.values()),
        waiting_adapters=_adapter_names(engine, scheduler.waiting),
        prompt_tokens_total=scheduler.num_prompt_tokens,
        cached_prompt_tokens_total=scheduler.num_cached_prompt_tokens,
        generated_tokens_total=scheduler.num_generated_tokens,
        preemptions_total=scheduler.num_preemptions,
        adapter_loads_total=traffic.num_loads,
        adapter_evictions_total=traffic.num_evictions,
        adapter_load_seconds_total=traffic.load_seconds,
        decode_tokens_per_second=throughput.decode_rate,
        prefill_tokens_per_second=throughput.prefill_rate,
    )


def _adapter_info(status: LoRAStatus) -> AdapterInfo:
    ref = status.ref
    return AdapterInfo(
        ref.name,
        ref.path,
        ref.lora_id,
        ref.pinned,
        status.resident,
        status.rank,
        status.num_open,
    )


def _adapter_names(engine: Engine, requests: Iterable[Request]) -> list[str]:
    """Names of the adapters that requests use, each once."""
    uses = {use.lora_id: use for request in requests for use in request.adapters}
    return sorted({engine.lora_manager.name(use) for use in uses.values()})
