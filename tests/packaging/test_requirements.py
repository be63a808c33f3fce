"""requirements.lock pins all that pyproject.toml asks for, inside its ranges."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_pins_every_requirement_within_its_range() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonical(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for requirement in map(Requirement, asked):
        assert versions[canonical(requirement.name)] in requirement.specifier, requirement
    assert versions["torch"] == "2.13.0" and versions["triton"] == "3.7.1"
    assert not any("+" in version for version in versions.values()), "local builds cannot be had"
