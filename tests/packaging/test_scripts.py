"""The scripts find a Python, make the environment once, and say in one line what is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "dirname", "sha256sum")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout of nothing but scripts, beside a PATH of nothing but `TOOLS`."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy2(ROOT / name, checkout)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    return checkout


def fake_python(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def run(checkout: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    home = checkout.parent
    return subprocess.run(
        [checkout / "scripts" / script, *arguments],
        env={"PATH": str(home / "bin"), "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_no_python(bare: Path) -> None:
    assert last_line(run(bare, "run")) == (
        "no Python 3.11, 3.12 or 3.13 found; install one: apt-get install python3 python3-venv"
    )


def test_no_venv_module(bare: Path) -> None:
    fake_python(bare.parent / "bin" / "python3", '[[ "$2" != *ensurepip* ]]')
    assert last_line(run(bare, "run")) == (
        "python3 has no venv module; install it: apt-get install python3-venv"
    )


def test_the_environment_is_made_once(bare: Path) -> None:
    calls = bare.parent / "calls"

    def arguments() -> list[str]:
        """What Python was called with since the last look."""
        found = calls.read_text().splitlines()
        calls.unlink()
        return found

    fake_python(bare / ".venv" / "bin" / "python", f'echo "$@" >> {calls}')
    install = (
        "-m pip install -qq --disable-pip-version-check "
        f"--constraint {bare}/requirements.lock --editable {bare}"
    )
    assert "takes some minutes" in run(bare, "run", "a=1", "b=c d").stderr
    assert arguments() == ["-c import pip", install, "-m engine a=1 b=c d"]
    assert run(bare, "run").stderr == ""
    assert arguments() == ["-m engine"]
    run(bare, "test", "-q")
    assert arguments() == ["-c import pip", f"{install}[test]", "-m pytest -q"]
    (bare / "requirements.lock").write_text("torch==2.13.0\n")
    run(bare, "run")
    assert arguments() == ["-c import pip", install, "-m engine"]


def test_a_failed_install_is_tried_again(bare: Path) -> None:
    fake_python(bare / ".venv" / "bin" / "python", '[[ "$2" != pip ]]')
    assert last_line(run(bare, "test")) == "pip could not install the engine, see above"
    assert last_line(run(bare, "test")) == "pip could not install the engine, see above"


@pytest.mark.parametrize("has_card", [True, False])
def test_gpu_tests_need_a_card(bare: Path, has_card: bool) -> None:
    calls = bare.parent / "calls"
    body = f'echo "$@" >> {calls}; [[ "$2" != *is_available* ]] || exit {int(not has_card)}'
    fake_python(bare / ".venv" / "bin" / "python", body)
    done = run(bare, "test", "gpu", "-k", "name")
    if has_card:
        assert calls.read_text().splitlines()[-1] == "-m pytest -m gpu -k name"
    else:
        assert last_line(done) == ("scripts/test gpu: torch finds no CUDA device on this machine")
