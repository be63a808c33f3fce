"""The GPU benchmarks: the scripts run on the CPU in Triton's interpreter, a failing row does not
take the others along, and the arithmetic of reports is right.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.bench.isolate import Answer, Limits, run_rows
from engine.bench.profile import Span, analyse
from engine.bench.report import Report, table
from engine.bench.shapes import LLAMA_8B
from engine.models.spec import ModelSpec

ROOT = Path(__file__).parents[2]
NAMES = ("kernels", "decode", "adapter_load")
SMOKE = [  # script, arguments, rows
    ("kernels", ["--only", "decode_attention", "expand_add", "silu_mul"], 10),
    ("decode", ["--batches", "2", "--rows", "mixed", "--what", "step"], 1),
    ("decode", ["--batches", "2", "--profile", "--set", "kernels=reference"], 6),
    ("adapter_load", [], 2),
]
# Answers row 1; fails at 2, dies at 3, hangs at 4, breaks its device at 5.
WORKER = """
import json, os, sys, time
from engine.bench.isolate import serve_rows
def measure(row):
    if row in (2, 5): raise ValueError(f"row {row} cannot be measured")
    if row == 3: os._exit(7)
    if row == 4: time.sleep(60)
    print("some words"); return {"pid": os.getpid(), "square": row * row}
broken = "5" in sys.argv[-1][:2]
serve_rows(json.loads(sys.argv[-1]), lambda: {"pid": os.getpid()}, measure, lambda: broken)
"""


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / f"bench_{name}.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("name", "arguments", "num_rows"), SMOKE)
def test_scripts_run(name: str, arguments: list[str], num_rows: int, tmp_path: Path) -> None:
    done = run_script(name, "--smoke", "--out", str(tmp_path), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    last = done.stdout.splitlines()[-1]
    assert last == f"{num_rows} rows, 0 failed, written to {path}"
    text = path.read_text()
    assert path.name == f"{time.strftime('%Y-%m-%d')}-cpu-{name.replace('_', '-')}.md"
    for word in (f"torch {torch.__version__}", "Command: `", "--smoke", "| --"):
        assert word in text
    assert "WRONG" not in text and "not run" not in text


def test_rows_after_the_time_are_not_begun() -> None:
    done = run_script("kernels", "--smoke", "--minutes", "0", "--only", "rms_norm")
    assert done.returncode == 1
    assert "not run, the time was over" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_card_they_say_so(name: str) -> None:
    done = run_script(name)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"bench_{name}.py: ") and "CUDA" in line


def test_the_shell_script_stops_at_the_first_that_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("bench", "env.sh"):
        shutil.copy2(ROOT / "scripts" / name, tmp_path / "scripts")
    for name in ("pyproject.toml", "requirements.lock"):
        (tmp_path / name).write_text("")
    python, calls = tmp_path / ".venv" / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir(parents=True)

    def run(code: int) -> tuple[int, list[str]]:
        """Status, and what was called, when benchmarks end with `code`."""
        python.write_text(
            f'#!/bin/bash\n[[ $1 == scripts/* ]] || exit 0\necho "$@" >> {calls}\nexit {code}\n'
        )
        python.chmod(0o755)
        calls.unlink(missing_ok=True)
        done = subprocess.run([tmp_path / "scripts" / "bench", "--quick"], capture_output=True)
        return done.returncode, calls.read_text().splitlines()

    out = "--out docs/benchmarks"
    first = f"scripts/bench_kernels.py {out} --quick"
    rest = [
        f"scripts/bench_decode.py {out} --profile --quick",
        f"scripts/bench_adapter_load.py {out} --quick",
    ]
    assert run(2) == (2, [first])
    assert run(1) == (1, [first, *rest])
    assert run(0) == (0, [first, *rest])


def answers(tmp_path: Path, rows: list[int], limits: Limits) -> list[Answer]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return list(run_rows([sys.executable, str(script)], rows, limits))


def test_a_row_gets_its_own_blame(tmp_path: Path) -> None:
    found = answers(tmp_path, [1, 2, 3, 4, 6, 5, 7], Limits(row_s=3))
    rows = [answer.row for answer in found]
    assert rows == [None, 1, 2, 3, None, 4, None, 6, 5, 7]
    pids = [answer.values["pid"] for answer in found if answer.row is None]
    assert len(set(pids)) == 3
    assert {answer.row: answer.error for answer in found if answer.error} == {
        2: "ValueError: row 2 cannot be measured",
        3: "the process ended with code 7",
        4: "no answer within 3 s",
        5: "ValueError: row 5 cannot be measured",
    }
    assert found[-1].values["square"] == 49


def test_a_broken_device_needs_a_new_process(tmp_path: Path) -> None:
    found = answers(tmp_path, [5, 7], Limits())
    assert [answer.row for answer in found] == [None, 5, None, 7]
    assert found[0].values["pid"] != found[2].values["pid"] == found[3].values["pid"]


def test_a_worker_that_cannot_start_fails_all_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(9)"]
    found = list(run_rows(command, [4, 2], Limits()))
    assert found == [Answer(row, {}, "the process ended with code 9") for row in (4, 2)]


def test_idle_time_of_steps() -> None:
    """Two steps, begun at 0 and 100: work overlaps, pauses within a step and between the two."""
    spans = [
        Span("gemm", 10, 30),
        Span("norm", 25, 40),
        Span("Memcpy DtoH", 50, 60),
        Span("gemm", 110, 130),
        Span("norm", 130, 140),
    ]
    found = analyse(spans, [0, 100], 6)
    assert (found.step_us, found.busy_us) == (65, 35)
    assert (found.idle_us, found.between_us) == (30, 25)
    assert (found.num_kernels, found.num_launches) == (2, 3)
    assert found.top[0] == ("gemm", 20, 1)
    with pytest.raises(RuntimeError, match="no work"):
        analyse([], [0], 0)


def test_bytes_of_llama_8b() -> None:
    assert LLAMA_8B.step_weight_bytes == pytest.approx(15.0e9, rel=2e-3)
    assert LLAMA_8B.adapter_bytes(16) == pytest.approx(84e6, rel=2e-3)
    assert LLAMA_8B.kv_bytes_per_token == 128 << 10
    adapters, tokens = 2 * LLAMA_8B.adapter_bytes(8), 3 * LLAMA_8B.kv_bytes_per_token
    assert LLAMA_8B.step_bytes((8, 8), 3) == LLAMA_8B.step_weight_bytes + adapters + tokens
    spec = ModelSpec.from_config(LLAMA_8B.config())
    assert (spec.num_layers, spec.head_dim, spec.tie_word_embeddings) == (32, 128, False)


def test_reports(tmp_path: Path) -> None:
    assert table(("a", "b"), [("one | two", "3")]) == (
        "| a         |   b |\n| --------- | --: |\n| one / two |   3 |"
    )
    report = Report("Things", "things", tmp_path, ["bench.py", "--set", "a b"])
    path = report.write("NVIDIA H200 (one)", ["torch 1", "copy 2 TB/s"], "| t |")
    assert path is not None and path.name.endswith("-nvidia-h200-things.md")
    lines = path.read_text().splitlines()
    assert lines[0] == "# Things" and lines[-1] == "| t |"
    assert lines[2].endswith("NVIDIA H200 (one). torch 1. copy 2 TB/s.")
    assert lines[4] == "Command: `bench.py --set 'a b'`"
