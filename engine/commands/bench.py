"""`command=bench`: prefill and decode rates for base only and for all adapters mixed, per batch
size.
"""

from engine.bench.workload import measure, random_prompts
from engine.commands.result import JobResult
from engine.containers import EngineContainer


def run(container: EngineContainer) -> JobResult:
    """Print a table; the job's rate is the last row's decode."""
    cfg = container.config().command
    engine = container.engine()
    names = [ref.name for ref in engine.list_adapters()]
    mixes: list[tuple[str, list[str | None]]] = [("base", [None])]
    if names:
        mixes.append((f"{len(names)} adapters", list(names)))
    measure(engine, random_prompts(1, 8, engine.model.spec.vocab_size), [None], 2)
    print(f"{'batch':>5}  {'mix':<12}  {'prefill tok/s':>13}  {'decode tok/s':>12}  {'ms/step':>8}")
    rate = 0.0
    for size in cfg.batch_sizes:
        prompts = random_prompts(size, cfg.prompt_tokens, engine.model.spec.vocab_size)
        for label, adapters in mixes:
            rates = measure(engine, prompts, adapters, cfg.new_tokens)
            rate = rates.decode_rate
            step_ms = 1000 * size / rate if rate else 0.0
            print(
                f"{size:>5}  {label:<12}  {rates.prefill_rate:>13.1f}  {rate:>12.1f}  "
                f"{step_ms:>8.1f}"
            )
    return JobResult(tokens_per_second=rate, kv_tokens=engine.kv_pool.num_tokens)
