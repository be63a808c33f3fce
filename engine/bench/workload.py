"""Fixed workloads for measuring an engine: random prompts of one length, greedy, no early stop."""

import random
from collections.abc import Sequence

from engine.serving.engine import Engine
from engine.serving.throughput import Throughput


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` token ids, the same for the same arguments."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def measure(
    engine: Engine, prompts: Sequence[list[int]], adapters: Sequence[str | None], new_tokens: int
) -> Throughput:
    """Run the prompts as one batch, adapters round-robin; rates of this run alone."""
    sampling = engine.sampling_params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    engine.throughput = Throughput()
    names = [adapters[i % len(adapters)] for i in range(len(prompts))]
    engine.generate(list(prompts), sampling, names)
    return engine.throughput
