"""Times of an engine under a fixed workload: steps of a batch that decodes, and prompts.

A step's time is (seconds for all new tokens - seconds for one) / (new tokens - 1): whatever the
first token costs is left out.
"""

import statistics
import time
from collections.abc import Sequence

from engine.bench.workload import random_prompts
from engine.runtime.request import FinishReason
from engine.serving.engine import Engine

Names = Sequence[str | None]


def round_robin(names: Names, batch: int) -> list[str | None]:
    """Adapters of a batch's rows; no names: the base."""
    return [names[row % len(names)] if names else None for row in range(batch)]


def run_seconds(engine: Engine, prompts: Sequence[list[int]], names: Names, new: int) -> float:
    """Seconds until all prompts have `new` tokens each. Raises RuntimeError if one fails."""
    sampling = engine.sampling_params(temperature=0.0, max_tokens=new, ignore_eos=True)
    started = time.perf_counter()
    served = engine.generate(list(prompts), sampling, list(names))
    seconds = time.perf_counter() - started
    for completion in served:
        if completion.finish_reason is not FinishReason.length:
            raise RuntimeError(completion.error or f"ended with {completion.finish_reason.value}")
    return seconds


def decode_times(
    engine: Engine, names: Names, *, batch: int, prompt: int, new: int, repeat: int
) -> dict[str, float]:
    """Medians of `repeat` runs after one to warm up: `step_s`, `first_s` of the first tokens,
    `tokens_per_s` of new tokens over the whole run.
    """
    prompts = random_prompts(batch, prompt, engine.model.spec.vocab_size)
    own = round_robin(names, batch)
    run_seconds(engine, prompts, own, new)
    first, whole = (
        statistics.median(run_seconds(engine, prompts, own, count) for _ in range(repeat))
        for count in (1, new)
    )
    step_s = (whole - first) / (new - 1)
    return {"step_s": step_s, "first_s": first, "tokens_per_s": batch * new / whole}


def prefill_rate(
    engine: Engine, names: Names, *, batch: int, prompt: int, repeat: int
) -> dict[str, float]:
    """`tokens_per_s` of prompts until each has its first token; median after one to warm up."""
    prompts = random_prompts(batch, prompt, engine.model.spec.vocab_size)
    own = round_robin(names, batch)
    run_seconds(engine, prompts, own, 1)
    seconds = statistics.median(run_seconds(engine, prompts, own, 1) for _ in range(repeat))
    return {"tokens_per_s": batch * prompt / seconds}
