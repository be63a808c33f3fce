"""Adapters by the thousand: mutated files, and adapters that PEFT makes from random settings.

Needs the test extra. Usage: .venv/bin/python scripts/fuzz_adapters.py mutate [--count 20000]
                             .venv/bin/python scripts/fuzz_adapters.py generate [--count 200]
`mutate`: every file must be refused, or loaded with the numbers that a second reader finds in it.
It runs in processes of its own, so that a crash or a hang of the whole process is counted and not
the end. `generate`: every adapter must give PEFT's logits or be refused where a refusal is right.
Both take --seed, the first one. Prints a table; status 1 if anything went wrong. Files with faults
are kept under --keep.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "lora" / "generated"), str(ROOT / "tests")]
CASES, BASES = ROOT / "tests" / "data" / "cases", ROOT / "tests" / "data" / "bases"
FILES_PER_PROCESS = 1000
NUM_MADE = 24
# After this time a file's process ends: what C code does cannot be interrupted otherwise.
STUCK_SECONDS = 30


def mutate_some(start: int, stop: int, made: Path, folder: Path, keep: Path) -> None:
    """One process's share: a line of JSON for each file, flushed before and after."""
    import faulthandler
    import os
    import shutil

    from loguru import logger
    from verdicts import bases_in_engines, judge, mutate, sources

    logger.remove()
    os.chdir(folder)
    bases = bases_in_engines(BASES)
    found = sources(CASES, made, bases)
    mutated = folder / "mutated"
    for seed in range(start, stop):
        source = found[seed % len(found)]
        kind = mutate(source, mutated, seed)
        _tell(seed=seed, kind=kind)
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        outcome, word = judge(mutated, bases[source.base])
        faulthandler.cancel_dump_traceback_later()
        if outcome not in ("refused", "right"):
            word = f"{word} ({source.folder})"
            shutil.copytree(mutated, keep / str(seed), symlinks=True, copy_function=_copy)
        _tell(seed=seed, outcome=outcome, word=word[:300])


def _copy(source: str, target: str) -> None:
    """As shutil.copy2, for what is a plain file of a sane size."""
    import shutil

    if Path(source).is_file() and Path(source).stat().st_size < 1 << 28:
        shutil.copy2(source, target)


def _tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def mutate_many(count: int, first: int, keep: Path) -> int:
    """All shares, one process after the other; the table."""
    from made_adapters import make_sound
    from verdicts import OUTCOMES

    keep.mkdir(parents=True, exist_ok=True)
    table: Counter[tuple[str, str]] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        made, folder = Path(scratch) / "made", Path(scratch) / "work"
        make_sound(NUM_MADE, BASES, made)
        folder.mkdir()
        started = time.monotonic()
        seed, end = first, first + count
        while seed < end:
            share = [seed, min(seed + FILES_PER_PROCESS, end), made, folder, keep]
            command = [sys.executable, __file__, "share", *map(str, share)]
            done = subprocess.run(command, capture_output=True, check=False)
            kind = "mutating itself"
            for line in done.stdout.decode().splitlines():
                event = json.loads(line)
                kind = event.get("kind", kind)
                if "outcome" in event:
                    seed = event["seed"] + 1
                    table[kind, event["outcome"]] += 1
                    if event["outcome"] not in ("refused", "right"):
                        faults.append(f"seed {event['seed']}, {kind}, {event['outcome']}: "
                                      f"{event['word']}")  # fmt: skip
                    kind = "mutating itself"
            if done.returncode:
                is_stuck = b"Timeout (" in done.stderr
                table[kind, "hang" if is_stuck else "crash"] += 1
                word = "stuck" if is_stuck else done.stderr.decode(errors="replace")[-300:]
                faults.append(f"seed {seed}, {kind}: its process ended ({done.returncode}): {word}")
                seed += 1
            print(f"{seed - first} files, {len(faults)} faults", file=sys.stderr, flush=True)
        seconds = time.monotonic() - started
    print(f"{'mutation':<16}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
    for kind in sorted({kind for kind, _ in table}):
        print(f"{kind:<16}" + "".join(f"{table[kind, outcome]:>10,}" for outcome in OUTCOMES))
    sums = [sum(n for (_, own), n in table.items() if own == outcome) for outcome in OUTCOMES]
    print(f"{'all':<16}" + "".join(f"{total:>10,}" for total in sums))
    print(f"{sum(sums):,} files in {seconds:.0f} s, {len(faults)} faults")
    for fault in faults[:40]:
        print("  ", fault)
    return 1 if faults else 0


def generate_many(count: int, seed: int) -> int:
    """Random adapters of PEFT's; the table."""
    from loguru import logger
    from made_adapters import run_many

    logger.remove()
    return run_many(count, seed, BASES)


if __name__ == "__main__":
    if sys.argv[1:2] == ["share"]:
        mutate_some(int(sys.argv[2]), int(sys.argv[3]), *map(Path, sys.argv[4:7]))
        sys.exit(0)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["mutate", "generate"])
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "fuzz_adapters")
    arguments = parser.parse_args()
    if arguments.what == "mutate":
        sys.exit(mutate_many(arguments.count or 20_000, arguments.seed, arguments.keep))
    sys.exit(generate_many(arguments.count or 200, arguments.seed))
