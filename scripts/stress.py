"""A soak test: random requests over many adapters on few slots while adapters are loaded, replaced
and unloaded, requests aborted, and a small KV pool forces preemption. Every finished request must
equal the same request alone.

Usage: .venv/bin/python scripts/stress.py [--seconds 1200] [--seed 0]
The tiny llama of tests/data runs on the CPU. "Alone" is a second engine: large pool, no prefix
cache, one request at a time. Tokens may differ where noise of NOISE on the logits changes the
choice as well (a near-tie); such cases are counted. Ends with status 1 if anything else differs,
is lost, or is left behind.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from engine import wiring
from engine.config import (
    DeviceConfig,
    EngineConfig,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.errors import EngineError
from engine.lora.ref import LoRARef
from engine.serving.engine import Engine

BASE = Path(__file__).parents[1] / "tests" / "data" / "bases" / "llama"
NUM_LAYERS, HIDDEN, FFN, KV, VOCAB = 2, 64, 128, 32, 512
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, FFN),
    "mlp.up_proj": (HIDDEN, FFN),
    "mlp.down_proj": (FFN, HIDDEN),
}
NUM_NAMES, NUM_SLOTS, MAX_RANK = 40, 4, 16
MAX_OPEN = 28
NOISE = 5e-5
NEVER_FITS = 1000
Uses = tuple[tuple[int, float], ...]


def adapter_of(version: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The adapter that a version number stands for: rank, modules and kind are drawn from it."""
    draw = random.Random(version)
    torch.manual_seed(version)
    rank = draw.choice([1, 4, 8, 8, 12, 16])
    dora, head = draw.random() < 0.15, draw.random() < 0.15
    chosen = draw.sample(sorted(WIDTHS), draw.randint(1, len(WIDTHS)))
    modules = {
        f"model.layers.{layer}.{name}": WIDTHS[name]
        for layer in range(NUM_LAYERS)
        for name in chosen
    }
    if head:
        modules["lm_head"] = (HIDDEN, VOCAB)
    tensors = {}
    for name, (width_in, width_out) in modules.items():
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(rank, width_in) * 0.3
        tensors[f"{key}.lora_B.weight"] = torch.randn(width_out, rank) * 0.3
        if dora:
            tensors[f"{key}.lora_magnitude_vector"] = torch.rand(width_out) + 0.5
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": dora}
    return tensors, config


@dataclass(frozen=True)
class Ask:
    """One request, by adapter versions, as both engines get it."""

    prompt: tuple[int, ...]
    uses: Uses
    params: tuple[tuple[str, Any], ...]

    @property
    def num_samples(self) -> int:
        return int(dict(self.params).get("n", 1))


@dataclass
class Open:
    """An ask on its way, and the tokens that came so far by sample."""

    ask: Ask
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def make_engine(*, kv_tokens: int, slots: int, cache: bool, running: int) -> Engine:
    config = EngineConfig(
        model=ModelConfig(path=str(BASE)),
        device=DeviceConfig(memory_bytes=128 << 20),
        lora=LoRAConfig(max_loras_per_batch=slots, max_lora_rank=MAX_RANK, pool_rank_rows=80),
        memory=MemoryConfig(fraction=1.0, page_size=4, max_kv_tokens=kv_tokens, prefix_cache=cache),
        scheduler=SchedulerConfig(max_running_requests=running, max_step_tokens=32, max_skips=16),
    )
    return wiring.build(config).engine()


class Alone:
    """Answers of single requests, and whether a choice of theirs was a near-tie."""

    def __init__(self) -> None:
        self.engine = make_engine(kv_tokens=4096, slots=8, cache=False, running=8)
        self._answers: dict[Ask, list[tuple[int, ...]]] = {}
        self._sample = self.engine.sampler.sample
        self.engine.sampler.sample = self._watch  # type: ignore[method-assign]
        self._num_choices, self._watched = 0, -1
        self._noisy_choices: list[list[int]] = []

    def _watch(self, logits: torch.Tensor, rows: Any) -> Any:
        """Sample; choice number `_watched` also with noise, while penalties count what they did."""
        if self._num_choices == self._watched:
            generator = torch.Generator().manual_seed(0)
            self._noisy_choices = [
                self._sample(logits + NOISE * torch.randn(logits.shape, generator=generator), rows)
                .token_ids.tolist()
                for _ in range(64)
            ]  # fmt: skip
        self._num_choices += 1
        return self._sample(logits, rows)

    def answer(self, ask: Ask) -> list[tuple[int, ...]]:
        """Tokens of each sample."""
        if ask not in self._answers:
            self._answers[ask] = self._run(ask)
        return self._answers[ask]

    def is_near_tie(self, ask: Ask, sample: int, place: int) -> bool:
        """Whether noise on the logits changes the choice of token `place` of sample `sample`."""
        self._num_choices, self._watched = 0, place
        answer = self._run(ask)
        self._watched = -1
        row = sum(len(tokens) > place for tokens in answer[:sample])
        return len({choices[row] for choices in self._noisy_choices}) > 1

    def _run(self, ask: Ask) -> list[tuple[int, ...]]:
        loaded = {ref.name for ref in self.engine.list_adapters()}
        for version, _ in ask.uses:
            if f"v{version}" not in loaded:
                self.engine.load_adapter_from_tensors(f"v{version}", *adapter_of(version))
        adapter = {f"v{version}": weight for version, weight in ask.uses} or None
        sampling = self.engine.sampling_params(**dict(ask.params))
        found = self.engine.generate([list(ask.prompt)], sampling, [adapter])
        for version, _ in ask.uses:
            self.engine.unload_adapter(f"v{version}")
        return [completion.token_ids for completion in found]


class Soak:
    """The engine under test, what is loaded under which name, and what is on its way."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.engine = make_engine(kv_tokens=224, slots=NUM_SLOTS, cache=True, running=12)
        self.alone = Alone()
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.names: dict[str, int] = {}
        self.open: dict[int, Open] = {}
        self.num_versions = 0
        self.prefixes = [[self.draw.randrange(3, VOCAB) for _ in range(40)] for _ in range(5)]

    def run(self, seconds: float) -> None:
        stop = time.monotonic() + seconds
        shown = time.monotonic()
        actions = [
            (self.submit, 30), (self.abort, 4), (self.load, 4), (self.unload, 3), (self.replace, 3),
            (self.load_broken, 1), (self.submit_wrong, 2), (self.step, 60),
        ]  # fmt: skip
        calls, weights = zip(*actions, strict=True)
        while time.monotonic() < stop:
            self.draw.choices(calls, weights)[0]()
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(dict(self.counts), flush=True)
        while self.open:
            self.step()
        self.check_left()

    # ------------------------------------------------------------------ actions

    def submit(self) -> None:
        if len(self.open) >= MAX_OPEN:
            return
        names = self.draw.sample(sorted(self.names), min(len(self.names), self.how_many()))
        weights = [1.0] if len(names) == 1 else [self.draw.choice([0.5, 1.0, -0.3]) for _ in names]
        if len(names) == 1 and self.draw.random() < 0.1:
            weights = [0.5]
        uses = tuple((self.names[name], w) for name, w in zip(names, weights, strict=True))
        adapter = dict(zip(names, weights, strict=True)) or None
        ask = Ask(tuple(self.prompt()), uses, tuple(sorted(self.params().items())))
        sampling = self.engine.sampling_params(**dict(ask.params))
        priority = self.draw.choice([0, 0, 0, 1, -1])
        request_id = self.engine.add_request(list(ask.prompt), sampling, adapter, priority=priority)
        self.open[request_id] = Open(ask)
        self.counts["submitted"] += 1

    def how_many(self) -> int:
        return self.draw.choices([0, 1, 2], [2, 12, 1])[0]

    def prompt(self) -> list[int]:
        shared = self.draw.choice(self.prefixes)[: self.draw.randint(0, 40)]
        return shared + [self.draw.randrange(3, VOCAB) for _ in range(self.draw.randint(1, 12))]

    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_tokens": self.draw.randint(1, 40),
            "ignore_eos": self.draw.random() < 0.7,
        }
        if self.draw.random() < 0.2:
            params |= {"temperature": 0.8, "seed": self.draw.getrandbits(31), "top_k": 40}
        if self.draw.random() < 0.15:
            params["repetition_penalty"] = 1.2
        if self.draw.random() < 0.1:
            params |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}
        if self.draw.random() < 0.1:
            params["min_tokens"] = self.draw.randint(0, params["max_tokens"])
        if self.draw.random() < 0.1:
            params["n"] = self.draw.randint(2, 3)
        return params

    def abort(self) -> None:
        if self.open:
            request_id = self.draw.choice(sorted(self.open))
            self.engine.abort(request_id)
            del self.open[request_id]
            self.counts["aborted"] += 1

    def load(self) -> None:
        free = [name for name in map("a{}".format, range(NUM_NAMES)) if name not in self.names]
        if free:
            self.load_as(self.draw.choice(free), replace=False)
            self.counts["loaded"] += 1

    def replace(self) -> None:
        if self.names:
            self.load_as(self.draw.choice(sorted(self.names)), replace=True)
            self.counts["replaced"] += 1

    def load_as(self, name: str, *, replace: bool) -> None:
        output = self.engine.lora_manager.load_lora_adapter_from_tensors(
            LoRARef(name, "memory"), *adapter_of(self.num_versions), replace=replace
        )
        assert output.success, output.error_message
        self.names[name] = self.num_versions
        self.num_versions += 1

    def unload(self) -> None:
        if len(self.names) > NUM_NAMES // 2:
            name = self.draw.choice(sorted(self.names))
            self.engine.unload_adapter(name)
            del self.names[name]
            self.counts["unloaded"] += 1

    def load_broken(self) -> None:
        tensors, config = adapter_of(self.num_versions)
        del tensors[self.draw.choice(sorted(tensors))]
        output = self.engine.lora_manager.load_lora_adapter_from_tensors(
            LoRARef(self.draw.choice([*self.names, "new"]), "memory"), tensors, config, replace=True
        )
        self.counts["broken adapters refused"] += not output.success
        if output.success:
            self.faults.append("an adapter without one of its tensors was accepted")

    def submit_wrong(self) -> None:
        wrong: list[tuple[list[int], Any, dict[str, Any]]] = [
            ([], None, {}),
            ([VOCAB + 3], None, {}),
            ([3] * 100, None, {"max_tokens": NEVER_FITS}),
            ([3], "never loaded", {}),
            ([3], {"never loaded": 1.0, **{name: 1.0 for name in list(self.names)[:1]}}, {}),
        ]
        prompt, adapter, params = self.draw.choice(wrong)
        try:
            self.engine.add_request(prompt, self.engine.sampling_params(**params), adapter)
        except EngineError:
            self.counts["wrong requests refused"] += 1
            return
        self.faults.append(f"accepted: {len(prompt)} tokens, {adapter}, {params}")

    def step(self) -> None:
        for event in self.engine.step():
            own = self.open.get(event.request_id)
            if own is None:
                self.faults.append(f"an event of request {event.request_id}, which is not open")
                continue
            if event.token_id is not None:
                own.tokens.setdefault(event.index, []).append(event.token_id)
            if event.finish_reason is not None:
                own.reasons[event.index] = event.finish_reason.value
                if event.error:
                    self.faults.append(f"request {event.request_id}: {event.error}")
            if len(own.reasons) == own.ask.num_samples:
                self.check(self.open.pop(event.request_id))
        self.counts["steps"] += 1

    # ------------------------------------------------------------------ checks

    def check(self, own: Open) -> None:
        self.counts["finished"] += 1
        expected = self.alone.answer(own.ask)
        for index, wanted in enumerate(expected):
            found = tuple(own.tokens.get(index, ()))
            self.counts["samples compared"] += 1
            self.counts["tokens compared"] += len(found)
            if found == wanted:
                continue
            place = next(
                (
                    i
                    for i, pair in enumerate(zip(found, wanted, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(found), len(wanted)),
            )
            if place < len(wanted) and self.alone.is_near_tie(own.ask, index, place):
                self.counts["near-ties"] += 1
                continue
            self.faults.append(f"{own.ask}, sample {index}: {found}, alone {wanted}")

    def check_left(self) -> None:
        """All is given back: pages, slots, cached prefixes of unloaded adapters, host memory."""
        scheduler, manager = self.engine.scheduler, self.engine.lora_manager
        scheduler.check_integrity()
        if scheduler.has_work:
            self.faults.append("requests are left")
        if any(resident.users for resident in manager.residents):
            self.faults.append("slots are still in use")
        for name in list(self.names):
            self.engine.unload_adapter(name)
        if manager._by_id or manager.residents:
            self.faults.append(f"{len(manager._by_id)} loads are left")
        scheduler.check_integrity()
        scheduler.prefix_cache.clear()
        if scheduler.pages.num_free != scheduler.pages.num_pages:
            self.faults.append("pages are left")


def main(seconds: float, seed: int) -> int:
    """Run, print the counts, return the exit status."""
    logger.remove()
    soak = Soak(seed)
    soak.run(seconds)
    cache = soak.engine.scheduler.prefix_cache.stats()
    print(f"\n{seconds:.0f} s, seed {seed}, {NUM_NAMES} names on {NUM_SLOTS} slots")
    soak.counts["near-ties"] += 0
    for what, count in sorted(soak.counts.items()):
        print(f"  {what:<26} {count:>9,}")
    print(f"  {'preemptions':<26} {soak.engine.scheduler.num_preemptions:>9,}")
    print(f"  prefix cache: {cache}")
    print(f"  {'faults':<26} {len(soak.faults):>9,}")
    for fault in soak.faults[:10]:
        print("   ", fault)
    return 1 if soak.faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(main(arguments.seconds, arguments.seed))
