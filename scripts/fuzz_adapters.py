"""Adapters by the thousand: mutated files, and adapters that PEFT makes from random settings.

Needs the test extra. Usage: .venv/bin/python scripts/fuzz_adapters.py mutate [--count 20000]
                             .venv/bin/python scripts/fuzz_adapters.py generate [--count 200]
`mutate`: every file must be refused, or loaded with the numbers that a second reader finds in it.
It runs in processes of its own, so that a crash or a hang of the whole process is counted and not
the end. `generate`: every adapter must give PEFT's logits or be refused where a refusal is right.
Prints a table; status 1 if anything went wrong.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "lora" / "generated"), str(ROOT / "tests")]
CASES, BASES = ROOT / "tests" / "data" / "cases", ROOT / "tests" / "data" / "bases"
FILES_PER_PROCESS = 1000
SECONDS_PER_PROCESS = 900


def mutate_some(start: int, stop: int, folder: Path) -> None:
    """One process's share: a line of JSON for each file, flushed before and after."""
    import os

    from conftest import tiny_config
    from loguru import logger
    from verdicts import judge, mutate, sources

    from engine import wiring

    logger.remove()
    os.chdir(folder)
    base_of = {
        p.name: json.loads((p / "expected.json").read_text())["base"] for p in CASES.iterdir()
    }
    bases = {
        name: wiring.build(
            tiny_config(BASES / name, lora={"max_lora_rank": 512}, memory_bytes=128 << 20)
        )
        .lora_manager()
        ._base
        for name in ("llama", "qwen2_bias", "phi3_fused")
    }
    found = sources(CASES, bases, base_of)
    for seed in range(start, stop):
        source = found[seed % len(found)]
        kind = mutate(source, folder / "mutated", seed)
        print(json.dumps({"seed": seed, "kind": kind}), flush=True)
        outcome, word = judge(folder / "mutated", bases[base_of[source.parent.name]])
        print(json.dumps({"seed": seed, "outcome": outcome, "word": word[:300]}), flush=True)


def mutate_many(count: int) -> int:
    """All shares, one process after the other; the table."""
    from verdicts import OUTCOMES

    table: Counter[tuple[str, str]] = Counter()
    faults: list[str] = []
    started = time.monotonic()
    seed = 0
    with tempfile.TemporaryDirectory() as scratch:
        while seed < count:
            stop = min(seed + FILES_PER_PROCESS, count)
            kind, died = "", ""
            command = [sys.executable, __file__, "share", str(seed), str(stop), scratch]
            try:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, timeout=SECONDS_PER_PROCESS, check=False
                )
                output, died = done.stdout, f"status {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired as expired:
                output, died = expired.stdout or b"", "hang"
            for line in output.decode().splitlines():
                event = json.loads(line)
                kind = event.get("kind", kind)
                if "outcome" in event:
                    seed = event["seed"] + 1
                    table[kind, event["outcome"]] += 1
                    if event["outcome"] not in ("refused", "right"):
                        faults.append(f"seed {event['seed']}, {kind}: {event['word']}")
            if died:
                table[kind, "hang" if died == "hang" else "crash"] += 1
                faults.append(f"seed {seed}, {kind}: the process died ({died})")
                seed += 1
            print(f"{seed} files, {len(faults)} faults", file=sys.stderr, flush=True)
    print(f"{'mutation':<16}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
    for kind in sorted({kind for kind, _ in table}):
        print(f"{kind:<16}" + "".join(f"{table[kind, outcome]:>10,}" for outcome in OUTCOMES))
    sums = [sum(n for (_, own), n in table.items() if own == outcome) for outcome in OUTCOMES]
    print(f"{'all':<16}" + "".join(f"{total:>10,}" for total in sums))
    print(f"{sum(sums):,} files in {time.monotonic() - started:.0f} s, {len(faults)} faults")
    for fault in faults[:20]:
        print("  ", fault)
    return 1 if faults else 0


def generate_many(count: int, seed: int) -> int:
    """Random adapters of PEFT's; the table."""
    from adapter_space import run_many

    return run_many(count, seed, BASES)


if __name__ == "__main__":
    if sys.argv[1:2] == ["share"]:
        mutate_some(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        sys.exit(0)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["mutate", "generate"])
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "mutate":
        sys.exit(mutate_many(arguments.count or 20_000))
    sys.exit(generate_many(arguments.count or 200, arguments.seed))
