"""`command=plan`: print the ledger of a start from shapes alone; no weight is read, no memory
taken.
"""

from engine.commands.result import JobResult
from engine.containers import EngineContainer


def run(container: EngineContainer) -> JobResult:
    """Print the memory plan and what a rank row costs."""
    kv_pool = container.kv_pool()
    lora_manager = container.lora_manager()
    print(kv_pool.render_plan())
    print(
        f"one rank row of an adapter on all projections: {lora_manager.pool_bytes_per_row:,} bytes"
    )
    return JobResult(tokens_per_second=None, kv_tokens=kv_pool.num_tokens)
