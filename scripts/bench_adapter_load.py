"""What loading an adapter costs the others: 32 requests decode while a rank-64 adapter on all seven
projections of Llama-3.1-8B (dummy weights) is loaded, from tensors or from a file.

Usage: .venv/bin/python scripts/bench_adapter_load.py [--set OVERRIDE ...] [--quick] [--out DIR]
Step times are from one step's end to the next one's, before the load, during it (until a request
that names the adapter has its first token) and after it. --set takes Hydra overrides.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_engine import EngineKind, Served, serve

from engine.bench.isolate import Answer, run_rows, serve_rows
from engine.bench.options import (
    check_can_run,
    limits_of,
    new_parser,
    worker_command,
    worker_env,
)
from engine.bench.report import Report, number, one_line, table
from engine.bench.shapes import LLAMA_8B, TINY

KIND = EngineKind("load", "8 adapters of rank 16, room for 2 of rank 64", (16,) * 8, 64, (64, 64))
SMOKE_KIND = EngineKind("load", "2 adapters, room for 2", (8, 8), 16, (16, 16))
PHASES = ("before", "during", "after")
SOURCES, TRAFFIC = ("tensors", "file"), ("the base", "adapters")
HEADER = (
    "loaded from",
    "others use",
    "load returns s",
    "usable s",
    *(f"{phase} {what}" for phase in PHASES for what in ("median ms", "max ms", "max/median")),
)
NOTE = (
    "Usable: from the call until a request that names the adapter has its first token; before that "
    "the load has returned. A rehearsal comes first; medians of the repetitions, of maxima the "
    "worst."
)


@dataclass(frozen=True)
class Sizes:
    """Of the workload: steps of `before` and `after`, and tokens that a request may have in all."""

    requests: int = 32
    prompt: int = 128
    steps: int = 100
    repeat: int = 3
    rank: int = 64
    most_tokens: int = 6000
    rehearsals: int = 1


def sizes_of(args: argparse.Namespace) -> Sizes:
    if args.smoke:
        return Sizes(2, 3, 1, 1, 16, 400, 0)
    return Sizes(steps=40, repeat=1) if args.quick else Sizes()


def rows_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Pairs of source and traffic."""
    traffic = TRAFFIC[:1] if args.smoke else TRAFFIC[1:] if args.quick else TRAFFIC
    return [(source, own) for own in traffic for source in SOURCES]


# ---------------------------------------------------------------------- in a worker


class StepClock:
    """When each step that gave tokens ended."""

    def __init__(self, engine: Any) -> None:
        self.ends: list[float] = []
        step = engine.step

        def timed() -> Any:
            events = step()
            if events:
                self.ends.append(time.perf_counter())
            return events

        engine.step = timed

    async def wait_for(self, count: int) -> None:
        """Until `count` more steps have ended. TimeoutError if they stop coming."""
        wanted, seen, at = len(self.ends) + count, len(self.ends), time.perf_counter()
        while len(self.ends) < wanted:
            await asyncio.sleep(0.002)
            if len(self.ends) != seen:
                seen, at = len(self.ends), time.perf_counter()
            elif time.perf_counter() - at > 60:
                raise TimeoutError("no step within 60 s")

    def phases(self, start: float, stop: float) -> dict[str, list[float]]:
        """Milliseconds of steps that ended before `start`, began after `stop`, or neither."""
        found: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for begin, end in zip(self.ends, self.ends[1:], strict=False):
            phase = "before" if end <= start else "after" if begin >= stop else "during"
            found[phase].append(1000 * (end - begin))
        return found


async def load_once(
    served: Served, clock: StepClock, load: Any, name: str, sizes: Sizes, names: Sequence[Any]
) -> dict[str, Any]:
    """One load under decoding requests, which are ended afterwards."""
    from engine.bench.decode import round_robin
    from engine.bench.workload import random_prompts
    from engine.serving.async_engine import AsyncEngine

    engine = served.engine
    few = engine.sampling_params(temperature=0.0, max_tokens=1, ignore_eos=True)
    many = engine.sampling_params(temperature=0.0, max_tokens=sizes.most_tokens, ignore_eos=True)
    prompts = random_prompts(sizes.requests + 1, sizes.prompt, engine.model.spec.vocab_size)
    owners = round_robin(names, sizes.requests)
    # Without listeners their events cost nothing beside the steps.
    ids = [
        engine.add_request(own, many, owner) for own, owner in zip(prompts, owners, strict=False)
    ]
    try:
        async with AsyncEngine(engine) as running:
            await clock.wait_for(min(20, sizes.steps))  # prompts, then a steady batch
            del clock.ends[:-1]
            await clock.wait_for(sizes.steps)
            start = time.perf_counter()
            await load(running, name)
            returned = time.perf_counter()
            async for event in running.stream(prompts[-1][:8], few, name):
                if event.error:
                    raise RuntimeError(event.error)
            usable = time.perf_counter()
            await clock.wait_for(sizes.steps)
            await running.unload_adapter(name)
    finally:
        for request_id in ids:
            engine.abort(request_id)
    phases = clock.phases(start, usable)
    return {"returned_s": returned - start, "usable_s": usable - start, "phases": phases}


def loader(source: str, maker: Any, sizes: Sizes, folder: Path) -> Any:
    """An async function of an AsyncEngine and a name that loads the adapter."""
    tensors, config = maker.tensors(99, sizes.rank), maker.config(sizes.rank)
    if source == "file":
        from safetensors.torch import save_file

        copies = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(copies, str(folder / "adapter_model.safetensors"))
        (folder / "adapter_config.json").write_text(json.dumps(config))

        async def from_file(running: Any, name: str) -> None:
            await running.load_adapter(name, folder)

        return from_file

    async def from_tensors(running: Any, name: str) -> None:
        load = getattr(running, "load_adapter_from_tensors", None)
        if load is not None:
            await load(name, tensors, config)
            return
        own = running.engine.load_adapter_from_tensors
        await running._run(lambda: own(name, tensors, config))  # between two steps, as files are

    return from_tensors


def measure(
    row: tuple[str, str], served: Served, clock: StepClock, maker: Any, sizes: Sizes
) -> Mapping[str, Any]:
    source, traffic = row
    names = [] if traffic == TRAFFIC[0] else served.names
    with tempfile.TemporaryDirectory() as folder:
        load = loader(source, maker, sizes, Path(folder))
        found = [
            asyncio.run(load_once(served, clock, load, f"new-{source}-{turn}", sizes, names))
            for turn in range(sizes.rehearsals + sizes.repeat)
        ][sizes.rehearsals :]
    values: dict[str, Any] = {
        key: statistics.median(one[key] for one in found) for key in ("returned_s", "usable_s")
    }
    for phase in PHASES:
        steps = [one["phases"][phase] for one in found]
        if not all(steps):
            raise RuntimeError(f"no step {phase} the load; the requests had ended")
        values[phase] = {
            "median": statistics.median(map(statistics.median, steps)),
            "max": max(map(max, steps)),
        }
    return values


def work(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    import torch

    from engine.bench.adapters import AdapterMaker
    from engine.bench.machine import is_broken, measure_machine
    from engine.bench.timing import make_timer

    spec, asked = json.loads(args.worker[0]), json.loads(args.worker[1])
    rows, sizes, shape = rows_of(args), sizes_of(args), TINY if args.smoke else LLAMA_8B
    device = torch.device("cpu" if args.smoke else "cuda")
    maker = AdapterMaker(shape, sizes.rank)
    running: list[Any] = []

    def start() -> Mapping[str, Any]:
        kind = SMOKE_KIND if args.smoke else KIND
        with tempfile.TemporaryDirectory() as folder:
            served = serve(kind, shape, Path(folder), args.set, smoke=args.smoke, started=started)
        running.extend((served, StepClock(served.engine)))
        machine = measure_machine(device, make_timer(device), matmul=False)
        torch.cuda.empty_cache()
        return {**machine.as_dict(), "start_s": served.start_s}

    def measured(row: int) -> Mapping[str, Any]:
        return measure(rows[row], *running, maker, sizes)

    serve_rows(asked, start, measured, lambda: is_broken(device), spec["deadline"])


# ---------------------------------------------------------------------- report


def cells(row: tuple[str, str], answer: Answer) -> list[str]:
    if answer.error:
        return [*row, one_line(answer.error), *["-"] * (len(HEADER) - 3)]
    found = [number(answer.values[key], 2) for key in ("returned_s", "usable_s")]
    for phase in PHASES:
        own = answer.values[phase]
        found += [number(own["median"], 2), number(own["max"], 2)]
        found.append(number(own["max"] / own["median"], 1))
    return [*row, *found]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--set", nargs="+", default=[], metavar="OVERRIDE", help="Hydra's")
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    check_can_run(args)
    rows, sizes, limits = rows_of(args), sizes_of(args), limits_of(args)
    report = Report("Adapters loaded under decoding requests", "adapter-load", args.out, sys.argv)
    shape, kind = (TINY, SMOKE_KIND) if args.smoke else (LLAMA_8B, KIND)
    megabytes = shape.adapter_bytes(sizes.rank) / 1e6
    work_of = (
        f"{sizes.requests} requests, prompts of {sizes.prompt} tokens; rank {sizes.rank}, "
        f"{megabytes:.0f} MB; {kind.words}; {sizes.repeat} repetitions, {sizes.steps} steps before "
        "and after"
    )
    device, facts = "no device", ["no engine started"]
    done: list[list[str]] = []
    path, body, num_failed = None, "", 0
    command = worker_command(json.dumps({"deadline": limits.deadline}))
    for answer in run_rows(command, range(len(rows)), limits, worker_env(args)):
        if answer.row is None:
            device = answer.values["device"]
            overrides = [f"overrides {' '.join(args.set)}"] if args.set else []
            facts = [answer.values["versions"], *overrides]
            continue
        num_failed += bool(answer.error)
        done.append(cells(rows[answer.row], answer))
        print("  ".join(done[-1]), flush=True)
        body = f"{work_of}.\n\n{NOTE}\n\n{table(HEADER, done, num_words=2)}"
        path = report.write(device, facts, body)
    print(f"\n{report.text(device, facts, body)}")
    print(f"\n{len(done)} rows, {num_failed} failed" + (f", written to {path}" if path else ""))
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
