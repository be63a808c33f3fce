"""`python -m engine`: Hydra composes the config, every job runs one command in its own container.

A user's mistake is one line on stderr and exit code 1; a defect shows its traceback. Nothing at the
top of this module imports torch, so that `--help`, `--cfg job` and completion answer at once.
"""

import os
import signal
import sys
import traceback

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from yaml import YAMLError  # type: ignore[import-untyped]

from engine.cli.explain import explain
from engine.cli.help import help_text, wants_help
from engine.cli.schema import register_schema
from engine.cli.sweep import JobRow, Sweep

FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: a user who sets it wants every traceback
INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its status: 0, 1 if any job failed, 130 on Ctrl-C."""
    if wants_help(sys.argv[1:]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a word
        print(help_text(sys.argv[1:]))
        return
    wants_tracebacks = os.environ.get(FULL_ERROR) == "1"
    os.environ[FULL_ERROR] = "1"  # Hydra then raises what it would print, it is explained here
    register_schema()
    sweep = Sweep()

    @hydra.main(version_base="1.3", config_path="pkg://engine.conf", config_name="config")
    def app(cfg: DictConfig) -> float:
        sweep.is_multirun = HydraConfig.get().mode is RunMode.MULTIRUN
        row = _run_one(cfg, number=len(sweep.rows), sweep=sweep, wants_tracebacks=wants_tracebacks)
        sweep.rows.append(row)
        return row.score

    try:
        app()
        status = 1 if sweep.num_failed else 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    except Exception as error:
        line = _explain_hydra(error)
        if line is None or wants_tracebacks:
            raise
        print(line, file=sys.stderr)
        status = 1
    if sweep.is_multirun and sweep.rows:
        print(sweep.table())
    sys.exit(status)


def _run_one(cfg: DictConfig, *, number: int, sweep: Sweep, wants_tracebacks: bool) -> JobRow:
    """Run one job; its failure is told on stderr and kept in the row, so that a sweep goes on."""
    from engine.cli.job import run_job

    overrides = list(HydraConfig.get().overrides.task)
    if sweep.is_multirun:
        print(f"job {number}: {' '.join(overrides)}", file=sys.stderr)
    try:
        return JobRow(overrides, result=run_job(cfg))
    except Exception as error:
        line = explain(error)
        if line is None or wants_tracebacks:
            traceback.print_exception(error)
        else:
            print(f"job {number} failed: {line}" if sweep.is_multirun else line, file=sys.stderr)
        return JobRow(overrides, reason=line or f"{type(error).__name__}: {error}")


def _explain_hydra(error: Exception) -> str | None:
    """As `explain`, and ValueErrors too: Hydra raises them for flags that exclude each other."""
    line = explain(error)
    if line is None and isinstance(error, ValueError | YAMLError):
        line = " ".join(str(error).split())
    return line


if __name__ == "__main__":
    main()
