"""CPU speed beside transformers and PEFT: same model, same prompts, same processes, in turn.

Needs the test extra. Usage: .venv/bin/python scripts/bench_cpu.py [--repeat 3] [--out FILE]
One process per batch size runs the engines alternately, so that a machine whose speed drifts slows
all of them. Decode rate = (new - 1) x batch / (seconds for all new tokens - seconds for one).
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# For all engines alike: idle OpenMP threads spin for the gap between two ops, then sleep. On a busy
# machine leave GOMP_SPINCOUNT at 0.
OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "12000"}
PROMPT, NEW, NUM_ADAPTERS, RANK, VOCAB = 64, 64, 8, 8, 49152
BATCHES = (1, 8, 32)
NAMES = [f"a{index}" for index in range(NUM_ADAPTERS)]
HF, PEFT, OURS, OURS_LORA = (
    "transformers base",
    "PEFT 8 adapters",
    "engine base",
    "engine 8 adapters",
)
Run = Callable[[int], None]


def load_transformers() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from engine.weights.default_model import default_model_directory

    return AutoModelForCausalLM.from_pretrained(default_model_directory(None), dtype=torch.float32)


def make_adapters(folder: Path) -> None:
    """Random rank-8 adapters on all linear layers."""
    import torch
    from peft import LoraConfig, get_peft_model

    for index, name in enumerate(NAMES):
        torch.manual_seed(index)
        config = LoraConfig(
            r=RANK, lora_alpha=16, target_modules="all-linear", init_lora_weights=False
        )
        get_peft_model(load_transformers(), config).save_pretrained(folder / name)


def random_batch(batch: int) -> list[list[int]]:
    from engine.bench.workload import random_prompts

    return random_prompts(batch, PROMPT, VOCAB)


def hf_run(model: Any, batch: int, **extra: Any) -> Run:
    """Greedy generation of exactly `new` tokens with transformers."""
    import torch

    ids = torch.tensor(random_batch(batch))
    fixed = {"do_sample": False, "pad_token_id": 2, **extra}

    def run(new: int) -> None:
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            model.generate(
                ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, **fixed
            )

    return run


def peft_run(model: Any, batch: int, adapters: Path) -> Run:
    from peft import PeftModel

    model = PeftModel.from_pretrained(model, adapters / NAMES[0], adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.load_adapter(adapters / name, adapter_name=name)
    return hf_run(model, batch, adapter_names=[NAMES[i % NUM_ADAPTERS] for i in range(batch)])


def load_engine(adapters: Path, dtype: str) -> Any:
    from loguru import logger

    from engine import wiring
    from engine.config import DType, EngineConfig, LoRAConfig, ModelConfig

    logger.remove()
    paths = {name: str(adapters / name) for name in NAMES}
    lora = LoRAConfig(adapters=paths, max_loras_per_batch=NUM_ADAPTERS)
    return wiring.build(EngineConfig(model=ModelConfig(dtype=DType(dtype)), lora=lora)).engine()


def engine_run(engine: Any, batch: int, names: list[Any]) -> Run:
    own = [names[i % len(names)] for i in range(batch)]
    prompts = random_batch(batch)

    def run(new: int) -> None:
        sampling = engine.sampling_params(temperature=0.0, max_tokens=new, ignore_eos=True)
        engine.generate(prompts, sampling, own)

    return run


def rates(run: Run, batch: int) -> tuple[float, float]:
    """Prefill and decode tokens per second of one repetition."""
    seconds = []
    for new in (1, NEW):
        started = time.perf_counter()
        run(new)
        seconds.append(time.perf_counter() - started)
    return PROMPT * batch / seconds[0], (NEW - 1) * batch / (seconds[1] - seconds[0])


def measure_batch(batch: int, adapters: Path, repeat: int) -> dict[str, tuple[float, float]]:
    """Medians by engine, engines in turn; PEFT once, at the end, for it changes its model."""
    model, engine = load_transformers(), load_engine(adapters, "float32")
    runs = {HF: hf_run(model, batch), OURS: engine_run(engine, batch, [None])}
    if batch > 1:
        runs[OURS_LORA] = engine_run(engine, batch, NAMES)
    for run in runs.values():
        run(2)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            found[name].append(rates(run, batch))
    if batch > 1:
        found[PEFT] = [rates(peft_run(model, batch, adapters), batch)]
    medians = {}
    for name, values in found.items():
        prefill, decode = zip(*values, strict=True)
        medians[name] = statistics.median(prefill), statistics.median(decode)
    return medians


def measure_memory(which: str, adapters: Path) -> float:
    """Peak resident MiB of a process that serves one batch of 32."""
    if which == HF:
        hf_run(load_transformers(), 32)(NEW)
    elif which == PEFT:
        peft_run(load_transformers(), 32, adapters)(2)
    else:
        engine_run(load_engine(adapters, "float32"), 32, NAMES)(NEW)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_bf16(adapters: Path) -> dict[str, Any]:
    """Decode rates in bf16 and its largest logprob difference to fp32 over 32 prompts' top 20."""
    engines = {dtype: load_engine(adapters, dtype) for dtype in ("float32", "bfloat16")}
    decode = {}
    for batch in BATCHES:
        run = engine_run(engines["bfloat16"], batch, [None])
        run(2)
        decode[batch] = rates(run, batch)[1]
    tops = []
    for engine in engines.values():
        sampling = engine.sampling_params(temperature=0.0, max_tokens=1, logprobs=20)
        served = engine.generate(random_batch(32), sampling)
        tops.append([dict(completion.logprobs[0].top) for completion in served])
    pairs = list(zip(*tops, strict=True))
    worst = max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())
    same = sum(max(a, key=a.get) == max(b, key=b.get) for a, b in pairs)
    return {"decode": decode, "worst": worst, "same": same}


def work(kind: str, argument: str, adapters: Path, repeat: int) -> None:
    """Run one measurement in this process and print it as JSON."""
    import torch

    torch.set_num_threads(2)
    if kind == "batch":
        result: Any = measure_batch(int(argument), adapters, repeat)
    elif kind == "memory":
        result = measure_memory(argument, adapters)
    else:
        result = measure_bf16(adapters)
    print(json.dumps(result))


def in_process(kind: str, argument: str, folder: str, repeat: int) -> Any:
    command = [sys.executable, __file__, "--work", kind, argument, folder, "--repeat", str(repeat)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in OPENMP.items():
        os.environ.setdefault(name, value)
    if args.work:
        kind, argument, folder = args.work
        work(kind, argument, Path(folder), args.repeat)
        return
    import torch

    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")

    show(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, 2 threads, torch {torch.__version__}")
    show(f"SmolLM2-135M, prompt {PROMPT}, {NEW} new tokens, greedy, median of {args.repeat}")
    with tempfile.TemporaryDirectory() as folder:
        make_adapters(Path(folder))
        for batch in BATCHES:
            found = in_process("batch", str(batch), folder, args.repeat)
            for name, (prefill, decode) in found.items():
                base = decode / found[HF][1]
                show(
                    f"batch {batch:>2}  {name:<18} prefill {prefill:>7.1f} tok/s  "
                    f"decode {decode:>7.1f} tok/s  {base:.2f} of transformers base"
                )
            if batch > 1:
                ours = found[OURS_LORA][1]
                own, peft = ours / found[OURS][1], ours / found[PEFT][1]
                show(f"batch {batch:>2}  8 adapters: {own:.2f} of own base, {peft:.1f} x PEFT")
        for name in (HF, PEFT, OURS_LORA):
            peak = in_process("memory", name, folder, 1)
            show(f"peak memory at batch 32  {name:<18} {peak:.0f} MiB")
        bf16 = in_process("bf16", "", folder, 1)
        speeds = ", ".join(f"{rate:.1f} at {batch}" for batch, rate in bf16["decode"].items())
        show(f"engine base in bf16: decode tok/s {speeds}")
        show(
            f"bf16 against fp32: logprobs differ by at most {bf16['worst']:.3f}, the same next "
            f"token for {bf16['same']} of 32 prompts"
        )


if __name__ == "__main__":
    main()
