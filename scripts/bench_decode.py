"""Decode steps and prompts of the whole engine on dummy Llama-3.1-8B weights, base and adapters.

Usage: .venv/bin/python scripts/bench_decode.py [--rows NAME ...] [--batches N ...] [--profile]
       [--set OVERRIDE ...] [--quick] [--out DIR] [--smoke]
Prompts of 128 random tokens, 128 new ones, greedy, no early stop, prefix cache off, adapters
round-robin over the batch. Step = (T(128 new) - T(1 new)) / 127. --set takes Hydra overrides:
`--set kernels=reference graph=off`. One process per engine; a row that fails says why.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_engine import EngineKind, serve

from engine.bench.isolate import Answer, run_rows, serve_rows
from engine.bench.options import (
    check_can_run,
    limits_of,
    new_parser,
    worker_command,
    worker_env,
)
from engine.bench.report import Report, number, one_line, share, table
from engine.bench.shapes import LLAMA_8B, TINY

MIXED = (8, 16, 32, 64) * 2
KINDS = (
    EngineKind("off", "LoRA off"),
    EngineKind("slots8", "8 slots, max rank 16", (16,) * 8),
    EngineKind("slots32", "32 slots, max rank 16", (16,) * 32),
    EngineKind("mixed", "8 slots, ranks 8 16 32 64", MIXED, 64),
    EngineKind("rank8", "8 slots, max rank 64, ranks 8", (8,) * 8, 64),
)
SMOKE_KINDS = (EngineKind("off", "LoRA off"), EngineKind("mixed", "2 slots", (8, 16), 32))
# Milliseconds of a step under the profiler mean little; 32 is where peers are compared.
PROFILE_BATCH = 32
DECODE_HEADER = (
    "adapters in the batch",
    "batch",
    "step ms",
    "of base",
    "floor ms",
    "floor/step",
    "first tokens ms",
    "tokens/s",
)
NOTE = (
    "Of base: the step of LoRA off over this one. Floor: bytes that a step must read (weights "
    "without the embedding, adapters in use, keys and values at the mean context) over the copy "
    "bandwidth of the same run. First tokens: until all rows have one. tokens/s: new tokens over "
    "the whole run."
)


@dataclass(frozen=True)
class Traffic:
    """What a batch asks of an engine: its first `num_adapters`, in turn."""

    name: str
    words: str
    kind: str
    num_adapters: int = 0


TRAFFIC = (
    Traffic("off", "LoRA off", "off"),
    Traffic("base", "LoRA on, base traffic", "slots8"),
    Traffic("one", "1 adapter", "slots8", 1),
    Traffic("eight", "8 distinct, rank 16", "slots8", 8),
    Traffic("thirtytwo", "32 distinct, rank 16", "slots32", 32),
    Traffic("mixed", "8 distinct, ranks 8 16 32 64", "mixed", 8),
    Traffic("rank8", "8 distinct, rank 8, max rank 64", "rank8", 8),
)
SMOKE_TRAFFIC = (TRAFFIC[0], Traffic("mixed", "2 distinct, ranks 8 16", "mixed", 2))


@dataclass(frozen=True)
class Row:
    """One measurement; `what` is step, prefill or profile."""

    what: str
    traffic: Traffic
    batch: int


@dataclass(frozen=True)
class Sizes:
    """Of the workload."""

    prompt: int = 128
    new: int = 128
    repeat: int = 3
    prefill_batch: int = 16
    prefill_prompt: int = 1024
    profile_steps: int = 10


def sizes_of(args: argparse.Namespace) -> Sizes:
    if args.smoke:
        return Sizes(5, 3, 1, 2, 8, 2)
    return Sizes(new=32, repeat=2) if args.quick else Sizes()


def rows_of(args: argparse.Namespace) -> list[Row]:
    """All rows, those of one engine together."""
    traffic = SMOKE_TRAFFIC if args.smoke else TRAFFIC
    if args.rows:
        traffic = tuple(own for own in traffic if own.name in args.rows)
    elif args.quick:
        traffic = tuple(own for own in traffic if own.name in ("off", "base", "eight"))
    batches = args.batches or ([2, 3] if args.smoke else [1, 32] if args.quick else None)
    batches = batches or [1, 8, 32, 64, 128]
    profile = [size for size in batches if size <= PROFILE_BATCH][-1:] or batches[:1]
    found = []
    for own in traffic:
        if "step" in args.what:
            found += [Row("step", own, size) for size in batches]
        if "prefill" in args.what:
            found.append(Row("prefill", own, sizes_of(args).prefill_batch))
        if args.profile or "profile" in args.what:
            found += [Row("profile", own, size) for size in profile]
    return found


# ---------------------------------------------------------------------- in a worker


def work(args: argparse.Namespace) -> None:
    """Build one engine and measure the rows that are asked for."""
    started = time.perf_counter()
    import torch

    from engine.bench.machine import is_broken, measure_machine
    from engine.bench.timing import make_timer

    spec, asked = json.loads(args.worker[0]), json.loads(args.worker[1])
    kinds, rows = SMOKE_KINDS if args.smoke else KINDS, rows_of(args)
    kind = next(own for own in kinds if own.name == spec["kind"])
    shape, device = TINY if args.smoke else LLAMA_8B, torch.device("cpu" if args.smoke else "cuda")
    engines: list[Any] = []

    def start() -> Mapping[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            served = serve(kind, shape, Path(folder), args.set, smoke=args.smoke, started=started)
        engines.append(served)
        machine = measure_machine(device, make_timer(device), matmul=False)
        torch.cuda.empty_cache()
        facts = {"kv_tokens": served.engine.kv_pool.num_tokens, "start_s": served.start_s}
        return {**machine.as_dict(), **facts, "load_s": served.load_s}

    def measured(number_of_row: int) -> Mapping[str, Any]:
        return measure(rows[number_of_row], engines[0], sizes_of(args))

    serve_rows(asked, start, measured, lambda: is_broken(device), spec["deadline"])


def measure(row: Row, served: Any, sizes: Sizes) -> Mapping[str, Any]:
    from engine.bench.decode import decode_times, prefill_rate
    from engine.bench.profile import profile_steps

    names = served.names[: row.traffic.num_adapters]
    engine, batch = served.engine, row.batch
    if row.what == "profile":
        steps = sizes.profile_steps
        return profile_steps(engine, names, batch=batch, prompt=sizes.prompt, steps=steps).as_dict()
    if row.what == "prefill":
        prompt = sizes.prefill_prompt
        return prefill_rate(engine, names, batch=batch, prompt=prompt, repeat=sizes.repeat)
    return decode_times(
        engine, names, batch=batch, prompt=sizes.prompt, new=sizes.new, repeat=sizes.repeat
    )


# ---------------------------------------------------------------------- report


@dataclass
class Results:
    """Answers so far; `engines` holds what each kind's first worker said of itself."""

    rows: Sequence[Row]
    sizes: Sizes
    args: argparse.Namespace
    engines: dict[str, Mapping[str, Any]]
    answers: dict[int, Answer]

    def step_ms(self, traffic: str, batch: int) -> float | None:
        for index, answer in self.answers.items():
            row = self.rows[index]
            if (row.what, row.traffic.name, row.batch) == ("step", traffic, batch):
                return None if answer.error else 1000 * answer.values["step_s"]
        return None

    def floor_ms(self, row: Row) -> float:
        kinds = SMOKE_KINDS if self.args.smoke else KINDS
        ranks = next(own.ranks for own in kinds if own.name == row.traffic.kind)
        shape = TINY if self.args.smoke else LLAMA_8B
        context = self.sizes.prompt + self.sizes.new / 2
        used = ranks[: min(row.traffic.num_adapters, row.batch)]
        num_bytes = shape.step_bytes(used, int(row.batch * context))
        copy: float = self.engines[row.traffic.kind]["copy"]
        return 1000 * num_bytes / copy

    def decode_cells(self, index: int) -> list[str]:
        row, answer = self.rows[index], self.answers[index]
        if answer.error:
            return [row.traffic.words, str(row.batch), one_line(answer.error), *["-"] * 5]
        step_ms, floor_ms = 1000 * answer.values["step_s"], self.floor_ms(row)
        base_ms = self.step_ms("off", row.batch)
        return [
            row.traffic.words,
            str(row.batch),
            number(step_ms, 2),
            share(None if base_ms is None else base_ms / step_ms),
            number(floor_ms, 2),
            share(floor_ms / step_ms),
            number(1000 * answer.values["first_s"], 1),
            number(answer.values["tokens_per_s"], 0),
        ]

    def prefill_cells(self, index: int) -> list[str]:
        row, answer = self.rows[index], self.answers[index]
        rate = answer.error or number(answer.values["tokens_per_s"], 0)
        return [row.traffic.words, one_line(rate)]

    def profile_text(self, index: int) -> str:
        row, answer = self.rows[index], self.answers[index]
        title = f"### A step of batch {row.batch}, {row.traffic.words}"
        if answer.error:
            return f"{title}\n\n{one_line(answer.error)}"
        own = answer.values
        step = own["step_us"]
        facts = (
            f"{step / 1000:.2f} ms under the profiler: idle {own['idle_us'] / step:.1%} (between "
            f"steps {own['between_us'] / step:.1%}), {own['num_kernels']:.0f} kernels, "
            f"{own['num_launches']:.0f} launches by the host (a graph is one)."
        )
        cells = [
            [name, number(us), share(us / step), number(calls)] for name, us, calls in own["top"]
        ]
        top = table(("kernel", "us a step", "of step", "calls a step"), cells)
        return f"{title}\n\n{facts}\n\n{top}"

    def engine_cells(self, kind: EngineKind) -> list[str]:
        facts = self.engines[kind.name]
        start_s, load_s = number(facts["start_s"]), number(facts["load_s"])
        return [kind.words, str(facts["kv_tokens"]), start_s, str(len(kind.ranks)), load_s]

    def body(self) -> str:
        parts = []
        by_what = {what: [] for what in ("step", "prefill", "profile")}
        for index in sorted(self.answers):
            by_what[self.rows[index].what].append(index)
        sizes, kinds = self.sizes, SMOKE_KINDS if self.args.smoke else KINDS
        known = [self.engine_cells(kind) for kind in kinds if kind.name in self.engines]
        parts.append(
            f"Prompts of {sizes.prompt} tokens, {sizes.new} new ones, median of {sizes.repeat} "
            f"runs after one to warm up.\n\n{NOTE}"
        )
        if known:
            head = ("engine", "KV tokens", "start s", "adapters", "loaded in s")
            parts.append(f"## Engines\n\n{table(head, known)}")
        if by_what["profile"]:
            found = "\n\n".join(self.profile_text(index) for index in by_what["profile"])
            parts.append(f"## Profiles\n\n{found}")
        if by_what["prefill"]:
            rows = [self.prefill_cells(index) for index in by_what["prefill"]]
            head = (
                "adapters in the batch",
                f"{sizes.prefill_batch} x {sizes.prefill_prompt} tokens/s",
            )
            parts.append(f"## Prefill\n\n{table(head, rows)}")
        if by_what["step"]:
            rows = [self.decode_cells(index) for index in by_what["step"]]
            parts.append(f"## Decode\n\n{table(DECODE_HEADER, rows)}")
        return "\n\n".join(parts)

    def device_and_facts(self) -> tuple[str, list[str]]:
        own = next(iter(self.engines.values()), None)
        if own is None:
            return "no device", ["no engine started"]
        shape = TINY if self.args.smoke else LLAMA_8B
        copies = ", ".join(f"{facts['copy'] / 1e12:.2f}" for facts in self.engines.values())
        model = f"{shape.name} shapes, dummy bfloat16 weights"
        overrides = " ".join(self.args.set)
        facts = [own["versions"], f"copy {copies} TB/s (read + write)", model]
        return own["device"], [*facts, *([f"overrides {overrides}"] if overrides else [])]


def progress(row: Row, answer: Answer) -> str:
    where = f"{row.what} {row.traffic.words}, batch {row.batch}"
    if answer.error:
        return f"{where}: {one_line(answer.error)}"
    if row.what == "step":
        return f"{where}: {1000 * answer.values['step_s']:.2f} ms"
    if row.what == "prefill":
        return f"{where}: {answer.values['tokens_per_s']:.0f} tokens/s"
    return f"{where}: idle {answer.values['idle_us'] / answer.values['step_us']:.1%}"


def main() -> None:
    parser = new_parser(__doc__)
    names = [own.name for own in TRAFFIC]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--batches", nargs="+", type=int, metavar="N")
    kinds = ("step", "prefill", "profile")
    parser.add_argument("--what", nargs="+", choices=kinds, default=kinds[:2])
    parser.add_argument("--profile", action="store_true", help=f"add one at batch {PROFILE_BATCH}")
    parser.add_argument("--set", nargs="+", default=[], metavar="OVERRIDE", help="Hydra's")
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    check_can_run(args)
    rows, limits = rows_of(args), limits_of(args)
    report = Report("Decode steps of the engine", "decode", args.out, sys.argv)
    results = Results(rows, sizes_of(args), args, {}, {})
    path = None
    for kind in dict.fromkeys(row.traffic.kind for row in rows):
        own = [index for index, row in enumerate(rows) if row.traffic.kind == kind]
        command = worker_command(json.dumps({"kind": kind, "deadline": limits.deadline}))
        for answer in run_rows(command, own, limits, worker_env(args)):
            if answer.row is None:
                results.engines.setdefault(kind, answer.values)
                continue
            results.answers[answer.row] = answer
            print(progress(rows[answer.row], answer), flush=True)
            path = report.write(*results.device_and_facts(), results.body())
    print(f"\n{report.text(*results.device_and_facts(), results.body())}")
    num_failed = sum(bool(answer.error) for answer in results.answers.values())
    print(f"\n{len(rows)} rows, {num_failed} failed" + (f", written to {path}" if path else ""))
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
