"""CPU decode speed beside transformers and PEFT: same model, same prompts, same run, one process
per row.

Needs the test extra. Usage: .venv/bin/python scripts/bench_cpu.py [--repeat 3] [--threads 2] [--out
FILE] Decode rate = (new - 1) x batch / (seconds for all new tokens - seconds for one), the same for
every engine.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROMPT, NEW, NUM_ADAPTERS, RANK = 64, 64, 8, 8
ROWS = (
    ("transformers", "base", 1), ("engine", "base", 1),
    ("transformers", "base", 8), ("engine", "base", 8),
    ("transformers", "base", 32), ("engine", "base", 32),
    ("engine", "8 adapters", 8), ("peft", "8 adapters", 8),
    ("engine", "8 adapters", 32), ("engine", "base", 32), ("peft", "8 adapters", 32),
    ("engine bf16", "base", 1), ("engine bf16", "base", 8), ("engine bf16", "base", 32),
    ("engine bf16", "8 adapters", 32),
)  # fmt: skip


def model_directory() -> Path:
    from engine.weights.default_model import default_model_directory

    return default_model_directory(None)


def make_adapters(folder: Path) -> None:
    """Random rank-8 adapters on all linear layers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for index in range(NUM_ADAPTERS):
        torch.manual_seed(index)
        base = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
        config = LoraConfig(
            r=RANK, lora_alpha=16, target_modules="all-linear", init_lora_weights=False
        )
        get_peft_model(base, config).save_pretrained(folder / f"a{index}")


def prompts(batch: int) -> list[list[int]]:
    from engine.bench.workload import random_prompts

    return random_prompts(batch, PROMPT, 49152)


def rates(run: Callable[[int], None], batch: int, repeat: int) -> dict[str, float]:
    """Median prefill and decode rates of `run(new_tokens)`."""
    run(2)
    prefill, decode = [], []
    for _ in range(repeat):
        seconds = []
        for new in (1, NEW):
            started = time.perf_counter()
            run(new)
            seconds.append(time.perf_counter() - started)
        prefill.append(PROMPT * batch / seconds[0])
        decode.append((NEW - 1) * batch / (seconds[1] - seconds[0]))
    return {"prefill": statistics.median(prefill), "decode": statistics.median(decode)}


def run_engine(mix: str, batch: int, adapters: Path, repeat: int, dtype: str) -> dict[str, float]:
    from loguru import logger

    from engine import wiring
    from engine.config import DType, EngineConfig, LoRAConfig, ModelConfig

    logger.remove()
    names = {f"a{i}": str(adapters / f"a{i}") for i in range(NUM_ADAPTERS)}
    config = EngineConfig(
        model=ModelConfig(dtype=DType(dtype)),
        lora=LoRAConfig(adapters=names if mix != "base" else {}, max_loras_per_batch=NUM_ADAPTERS),
    )
    engine = wiring.build(config).engine()
    own = [f"a{i % NUM_ADAPTERS}" if mix != "base" else None for i in range(batch)]

    def run(new: int) -> None:
        sampling = engine.sampling_params(temperature=0.0, max_tokens=new, ignore_eos=True)
        engine.generate(prompts(batch), sampling, own)

    return rates(run, batch, repeat)


def run_transformers(mix: str, batch: int, adapters: Path, repeat: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    extra = {}
    if mix != "base":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapters / "a0", adapter_name="a0")
        for index in range(1, NUM_ADAPTERS):
            model.load_adapter(adapters / f"a{index}", adapter_name=f"a{index}")
        extra["adapter_names"] = [f"a{i % NUM_ADAPTERS}" for i in range(batch)]
    ids = torch.tensor(prompts(batch))

    def run(new: int) -> None:
        with torch.inference_mode():
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                min_new_tokens=new, max_new_tokens=new, pad_token_id=2, **extra,
            )  # fmt: skip

    return rates(run, batch, repeat)


def run_row(engine: str, mix: str, batch: int, adapters: Path, repeat: int, threads: int) -> None:
    """One row, in this process; prints a line of JSON."""
    import torch

    torch.set_num_threads(threads)
    if engine.startswith("engine"):
        result = run_engine(
            mix, batch, adapters, repeat, "bfloat16" if "bf16" in engine else "float32"
        )
    else:
        result = run_transformers(mix, batch, adapters, 1 if engine == "peft" else repeat)
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"engine": engine, "mix": mix, "batch": batch, **result}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        engine, mix, batch, adapters = args.row
        run_row(engine, mix, int(batch), Path(adapters), args.repeat, args.threads)
        return
    import torch

    lines = [
        f"{platform.processor() or platform.machine()}, {args.threads} threads, torch "
        f"{torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}; prompt {PROMPT}, {NEW} new tokens, greedy, SmolLM2-135M",
        f"{'engine':<13} {'mix':<11} {'batch':>5} {'prefill tok/s':>14} {'decode tok/s':>13} "
        f"{'peak MiB':>9}",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_adapters(Path(folder))
        for engine, mix, batch in ROWS:
            command = [sys.executable, __file__, "--row", engine, mix, str(batch), folder]
            command += ["--repeat", str(args.repeat), "--threads", str(args.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout.splitlines()[-1])
            lines.append(
                f"{engine:<13} {mix:<11} {batch:>5} {row['prefill']:>14.1f} {row['decode']:>13.1f} "
                f"{row['peak_mib']:>9.0f}"
            )
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
