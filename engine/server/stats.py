"""`/v1/stats`: what the engine is doing, as JSON for the page. Monitoring reads `/metrics`."""

from typing import Any

import msgspec

from engine.server.client import EngineClient


def stats_payload(client: EngineClient) -> dict[str, Any]:
    """The engine's state, its last EngineStats, and its adapters; nothing is asked of the engine
    process.
    """
    info = client.info
    return {
        "state": client.state.value,
        "num_restarts": client.num_restarts,
        "info": {
            "pid": info.pid,
            "dtype": info.dtype,
            "device": info.device,
            "max_model_len": info.max_model_len,
        },
        "stats": msgspec.to_builtins(client.stats),
        "adapters": msgspec.to_builtins(client.adapters),
    }
