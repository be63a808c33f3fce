"""The command line as a user types it, each time a new process: status, streams, time, sweeps."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LORA_ENGINE = Path(sys.executable).with_name("lora-engine")
ANSWER_SECONDS = 1.0


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m engine` in an empty folder, HYDRA_FULL_ERROR as a user has it: unset."""
    env = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        cwd=cwd,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def tiny(bases: Path) -> list[str]:
    """Overrides that serve a tiny base without adapters."""
    return [
        "model=hf",
        f"model.path={bases / 'llama'}",
        "model.dtype=float32",
        "lora=default",
        "command.chat=false",
        'command.prompts=["a b"]',
        "command.progress=false",
        "sampling.max_tokens=4",
        f"device.memory_bytes={64 << 20}",
        "log_level=warning",
    ]


@pytest.mark.parametrize("question", [["--cfg", "job"], ["--help"]])
def test_questions_are_answered_at_once(question: list[str], tmp_path: Path) -> None:
    run(*question, cwd=tmp_path)  # files into the page cache, .pyc written
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = run(*question, cwd=tmp_path)
        seconds.append(time.perf_counter() - start)
    assert done.returncode == 0 and "max_loras_per_batch: 8" in done.stdout
    assert min(seconds) < ANSWER_SECONDS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["lora.max_lora_per_batch=8"],
        ["lora.max_loras_per_batch=eight"],
        ["lora.max_loras_per_batch=-1"],
        ["model=gpt"],
        ["--multirun", "--cfg", "job"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_full_error_shows_where_it_was_raised(tmp_path: Path) -> None:
    done = run("lora.max_loras_per_batch=-1", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_shell_completion(tmp_path: Path) -> None:
    def complete(line: str) -> list[str]:
        done = subprocess.run(
            [LORA_ENGINE, "-sc", "query=bash"],
            env=os.environ | {"COMP_LINE": line, "COMP_POINT": str(len(line))},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert complete("lora-engine lora.max") == ["lora.max_lora_rank=", "lora.max_loras_per_batch="]
    assert complete("lora-engine preset=s") == ["preset=small_memory"]


def test_one_job(tiny: list[str], tmp_path: Path) -> None:
    done = run(*tiny, "lora.max_loras_per_batch=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout and "base" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_sweep_goes_on_after_a_failure_and_ends_with_a_table(
    tiny: list[str], tmp_path: Path
) -> None:
    sweep = ["lora.max_loras_per_batch=-1,2,4"]
    done = run("--multirun", *tiny, *sweep, cwd=tmp_path)
    assert done.returncode == 1
    reason = "lora.max_loras_per_batch: got -1, allowed is a number from 0 to 4096"
    assert f"job 0 failed: {reason}" in done.stderr and "Traceback" not in done.stderr
    header, *rows = done.stdout.splitlines()[-4:]
    assert header.split() == ["job", "overrides", "tokens/s", "KV", "tokens", "outcome"]
    assert rows[0].endswith(f"failed: {reason}")
    for number, row in enumerate(rows[1:], start=1):
        job, override, rate, kv_tokens, outcome = row.split()
        assert (job, outcome) == (str(number), "ok")
        assert override == f"lora.max_loras_per_batch={2 * number}"
        assert float(rate.replace(",", "")) > 0 and int(kv_tokens.replace(",", "")) > 0


def test_ctrl_c(tiny: list[str], tmp_path: Path) -> None:
    endless = [*tiny, "command=bench", "command.new_tokens=64", "command.batch_sizes=[1,1,1,1,1,1]"]
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", *endless],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        text=True,
        # Tests that run in the background inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    process.stdout.readline()  # the table's head: the engine runs
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "interrupted"
