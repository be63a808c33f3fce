"""An EngineClient that only shows numbers, for tests of what is observed."""

from typing import Any

from engine.server.client import EngineClient, EngineState
from engine.server.messages import AdapterInfo, EngineInfo, EngineStats, LedgerLine

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_kv_tokens=400,
    num_kv_tokens_used=100,
    num_adapter_slots=8,
    num_adapters_resident=5,
    running_adapters=["pirate", "shout"],
    waiting_adapters=["json"],
    prompt_tokens_total=1000,
    cached_prompt_tokens_total=250,
    generated_tokens_total=77,
    preemptions_total=6,
    adapter_loads_total=9,
    adapter_evictions_total=4,
    adapter_load_seconds_total=1.5,
    decode_tokens_per_second=10.0,
    prefill_tokens_per_second=20.0,
)


def adapter(name: str, *, ready: bool = True) -> AdapterInfo:
    return AdapterInfo(name, f"/adapters/{name}", "id", False, ready, 8, 0)


class ObservedClient(EngineClient):
    """Ready, with `STATS` and the adapters given."""

    def __init__(self, *names: str, pid: int = 0) -> None:
        self.state = EngineState.ready
        self.num_restarts = 1
        self.stats = STATS
        self.adapters = tuple(adapter(name) for name in names)
        self.info = EngineInfo(
            pid=pid,
            model="/models/tiny",
            max_model_len=256,
            vocab_size=512,
            dtype="float32",
            device="cpu",
            max_adapter_slots=8,
            ledger=[LedgerLine("model", 100, "weights", False)],
            kv_bytes=300,
            budget_bytes=500,
            total_bytes=1000,
        )

    def stream(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def load_adapter(self, *args: Any, **kwargs: Any) -> AdapterInfo:
        raise NotImplementedError

    async def load_adapter_from_tensors(self, *args: Any, **kwargs: Any) -> AdapterInfo:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError
