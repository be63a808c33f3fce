"""Options that all GPU benchmarks have, and how their command lines start: on a card, or with
`--smoke` on the CPU, where Triton's interpreter runs tiny shapes.
"""

import argparse
import sys
import time
from pathlib import Path

from engine.bench.isolate import Limits

SMOKE_ENV = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
CANNOT_RUN = 2


def new_parser(doc: str) -> argparse.ArgumentParser:
    """With the options that all have; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the report there, too")
    parser.add_argument("--quick", action="store_true", help="fewer rows and repetitions")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--minutes", type=float, help="begin no row after so long")
    parser.add_argument("--row-seconds", type=float, default=180.0, help="longest row")
    parser.add_argument("--start-seconds", type=float, default=300.0, help="longest start")
    parser.add_argument("--worker", nargs=2, metavar=("SPEC", "ROWS"), help=argparse.SUPPRESS)
    return parser


def limits_of(args: argparse.Namespace) -> Limits:
    deadline = None if args.minutes is None else time.time() + 60 * args.minutes
    return Limits(args.start_seconds, args.row_seconds, deadline)


def worker_command(spec: str) -> list[str]:
    """This very command as a worker; `spec` is what it is told beside its rows."""
    return [sys.executable, *sys.argv, "--worker", spec]


def worker_env(args: argparse.Namespace) -> dict[str, str]:
    return dict(SMOKE_ENV) if args.smoke else {}


def check_can_run(args: argparse.Namespace) -> None:
    """Exit with one line unless there is a card, or nothing is asked of it."""
    if args.smoke:
        return
    from engine.bench.machine import cuda_fault

    fault = cuda_fault()
    if fault:
        name = Path(sys.argv[0]).name
        print(f"{name}: {fault} (--smoke tries the script on the CPU)", file=sys.stderr)
        sys.exit(CANNOT_RUN)
