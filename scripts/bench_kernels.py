"""Speed of the Triton kernels of a decode or prefill step, alone, at shapes of Llama-3.1-8B.

Usage: .venv/bin/python scripts/bench_kernels.py [--only NAME ...] [--quick] [--out DIR] [--smoke]
Each row: largest error against plain torch; microseconds, median over replays of a CUDA graph of
many calls, and with a cold L2 cache; what it moves or computes in a second, cold, and the share of
the ceiling measured in the same run; torch's own way beside it. Rows run in worker processes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from engine.bench.isolate import Answer, run_rows, serve_rows
from engine.bench.machine import Machine
from engine.bench.options import (
    check_can_run,
    limits_of,
    new_parser,
    worker_command,
    worker_env,
)
from engine.bench.report import Report, number, one_line, share, table
from engine.bench.shapes import LLAMA_8B, TINY

MOST_ERROR = 2e-2  # of bfloat16, rounded a few times
HEADER = ("kernel", "shape", "max error", "us", "us cold", "rate", "of ceiling", "torch", "us", "x")
NOTE = (
    "us: median over graph replays of many calls on the same tensors; us cold: with an L2 cache "
    "that holds nothing of them, which rates, shares and torch's time are of. Rate: bytes that "
    "must be moved (GB/s) or operations (TFLOP/s), whichever takes longer. Max error: "
    "largest difference to plain torch over its largest number. x: torch's time over ours. (e): "
    "not captured, launches count."
)


def cases(args: argparse.Namespace, device_type: str) -> list[Any]:
    """All rows; needs torch and Triton."""
    import torch

    from engine.bench import attention_cases as attention
    from engine.bench import lora_cases as lora
    from engine.bench.elementwise_cases import elementwise_cases

    target = attention.Target(torch.device(device_type), torch.bfloat16)
    shape, rows, mix = TINY if args.smoke else LLAMA_8B, attention.Rows, lora.Mix
    if args.smoke:
        decode, prefill = [rows((20, 33, 7))], [rows((18, 18), 18), rows((24,), 8)]
        tokens, mixes = [3], [mix(3, (16, 8)), mix(20, (16, 32), by_adapter=True)]
    elif args.quick:
        decode = [rows((length,) * batch) for batch in (8, 32) for length in (512, 4096)]
        prefill = [rows((2048,) * 8, 2048), rows((3072,) * 4, 1024)]
        tokens, mixes = [32, 8192], [mix(8, (16,) * 8), mix(32, (16,) * 8), mix(64, (64,) * 8)]
    else:
        batches, contexts = (1, 8, 32, 64, 128), (512, 4096)
        decode = [rows((length,) * batch) for batch in batches for length in contexts]
        decode += [rows(tuple(range(128, 4096, 128))), rows((512,) * 32, page_size=64)]
        prefill = [rows((1024,), 1024), rows((1024,) * 16, 1024), rows((2048,) * 8, 2048)]
        prefill += [rows((4096,) * 2, 4096), rows((8192,), 8192), rows((5120,) * 4, 1024)]
        tokens, mixes = [1, 8, 32, 64, 128, 8192], list(all_mixes(mix))
    used = [own for own in mixes if own.ranks]
    early = mixes[2:5] if len(mixes) > 4 else mixes[:1]
    found = [
        *attention.decode_cases(shape, decode, target),
        *attention.prefill_cases(shape, prefill, target),
        *elementwise_cases(shape, tokens, target),
        *attention.rope_cases(shape, tokens, target),
        *lora.shrink_cases(shape, used, target),
        *lora.expand_cases(shape, used, target),
        *lora.linear_cases(shape, mixes, target, early=False),
        *lora.linear_cases(shape, early, target, early=True),
    ]
    return [case for case in found if not args.only or case.kernel.split(",")[0] in args.only]


def all_mixes(mix: Any) -> Iterator[Any]:
    """Batches as engines see them: one adapter, several, of one rank and of mixed ranks."""
    mixed = (8, 16, 32, 64) * 2
    yield from (mix(1), mix(1, (16,)), mix(8, (16,) * 8), mix(32), mix(32, (16,) * 8))
    yield from (mix(32, (16,) * 32), mix(32, mixed), mix(64, (64,) * 8))
    yield from (mix(64, (64,) * 8, True), mix(128, (16,) * 32), mix(128, (16,) * 32, True))


def work(args: argparse.Namespace) -> None:
    """In a worker: measure the rows that are asked for."""
    import torch

    from engine.bench.kernel_case import measure
    from engine.bench.machine import is_broken, measure_machine
    from engine.bench.timing import make_timer

    device = torch.device("cpu" if args.smoke else "cuda")
    torch.manual_seed(0)
    timer, rows = make_timer(device), cases(args, device.type)
    machines: list[Machine] = []

    def start() -> Mapping[str, Any]:
        machines.append(measure_machine(device, timer))
        return machines[0].as_dict()

    def measured(row: int) -> Mapping[str, Any]:
        found = measure(rows[row], timer, machines[0])
        torch.cuda.empty_cache()
        return found

    spec, own = json.loads(args.worker[0]), json.loads(args.worker[1])
    serve_rows(own, start, measured, lambda: is_broken(device), spec["deadline"])


def is_wrong(answer: Answer) -> bool:
    return not answer.error and not answer.values["deviation"] <= MOST_ERROR


def cells(name: str, shape: str, answer: Answer) -> list[str]:
    if answer.error:
        return [name, shape, one_line(answer.error), *["-"] * 7]
    values = answer.values
    rate, unit = values["rate"], "GB/s"
    if not values["by_bytes"]:
        rate, unit = rate / 1000, "TFLOP/s"
    peer_us = values["peer_us"]
    return [
        name,
        shape,
        f"{values['deviation']:.1e}" + (" WRONG" if is_wrong(answer) else ""),
        number(values["warm_us"]) + (" (e)" if values["eager"] else ""),
        number(values["cold_us"]),
        f"{rate:.0f} {unit}",
        share(values["share"]),
        values["peer"] or "-",
        number(peer_us) + (" (e)" if values["peer_eager"] else ""),
        share(None if peer_us is None else peer_us / values["cold_us"]),
    ]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="kernels to measure")
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    check_can_run(args)
    names = [(case.kernel, case.shape) for case in cases(args, "cpu")]
    if not names:
        parser.error(f"--only: no kernel is called {' or '.join(args.only)}")
    limits = limits_of(args)
    report = Report("Kernels", "kernels", args.out, sys.argv)
    done: list[list[str]] = []
    machine, path, num_failed = None, None, 0
    command = worker_command(json.dumps({"deadline": limits.deadline}))
    for answer in run_rows(command, range(len(names)), limits, worker_env(args)):
        if answer.row is None:
            machine = machine or Machine(**answer.values)
            continue
        num_failed += bool(answer.error) or is_wrong(answer)
        done.append(cells(*names[answer.row], answer))
        print("  ".join(done[-1]), flush=True)
        device, facts = "no device", ["no worker started"]
        if machine is not None:
            device, facts = machine.device, [machine.versions, machine.ceilings]
        body = f"{NOTE}\n\n{table(HEADER, done, num_words=2)}"
        path = report.write(device, facts, body)
    print(f"\n{report.text(device, facts, body)}")
    print(f"\n{len(done)} rows, {num_failed} failed" + (f", written to {path}" if path else ""))
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
