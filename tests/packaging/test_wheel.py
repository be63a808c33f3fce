"""The wheel: one top-level name with everything in it; it works beside PyPI's `kernels`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "containers.py", "engine", "kernels", "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, links kept, so that no build folder of the checkout leaks in."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, source / name)
    output = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, timeout=120)
    (built,) = output.glob("*.whl")
    return built


def test_contents(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    top_level = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == {"engine"}
    expected = {"engine/containers.py", "engine/conf/__init__.py"}
    expected |= {f"engine/{path.relative_to(ROOT)}" for path in ROOT.glob("kernels/*.py")}
    expected |= {f"engine/{path.relative_to(ROOT)}" for path in ROOT.glob("conf/**/*.yaml")}
    modules = ROOT.glob("engine/**/*.py")
    expected |= {str(path.relative_to(ROOT)) for path in modules}
    demo = ROOT.glob("engine/lora/demo/*/adapter_*")
    expected |= {str(path.relative_to(ROOT)) for path in demo}
    assert expected - names == set()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and a foreign top-level package `kernels`.

    Dependencies come from this test's own environment through a .pth file: nothing is downloaded.
    """
    home = tmp_path_factory.mktemp("installed") / "env"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=120)
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("raise ImportError('the foreign kernels')\n")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, *arguments: str, cwd: Path) -> str:
    """Standard output of `python ARGUMENTS` in `cwd`; the checkout is not on its path."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_engine_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    where = run(installed, "-c", "import engine; print(engine.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parents[1])


def test_answers_from_any_folder(installed: Path, tmp_path: Path) -> None:
    printed = run(installed, "-m", "engine", "--cfg", "job", cwd=tmp_path)
    assert "max_loras_per_batch: 8" in printed
    script = installed.with_name("lora-engine")
    assert run(installed, str(script), "--cfg", "job", cwd=tmp_path) == printed


def test_runs_from_any_folder(installed: Path, tmp_path: Path, bases: Path) -> None:
    printed = run(
        installed,
        *("-m", "engine", "lora.max_loras_per_batch=8", "lora=default"),
        *("model=hf", f"model.path={bases / 'llama'}", "model.dtype=float32"),
        *("command.chat=false", 'command.prompts=["a b"]', "sampling.max_tokens=4"),
        f"device.memory_bytes={64 << 20}",
        cwd=tmp_path,
    )
    assert "tokens/s" in printed
