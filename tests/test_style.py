"""Lint, formatting and types, as `scripts/check` runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKS = {
    "lint": ["ruff", "check", "--quiet", "--no-cache", "."],
    "formatting": ["ruff", "format", "--quiet", "--no-cache", "--check", "."],
    "types": ["mypy", "--no-error-summary"],
}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_check(name: str) -> None:
    command = [sys.executable, "-m", *CHECKS[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
