"""The layout: imports go from low to high, none is bare or relative, no file is over 400 lines."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400

# Low to high; a module imports its own level or a lower one. Folders stand for all their modules.
LEVELS = (
    ("engine", "engine.errors", "engine.config", "engine.kernels"),
    (
        "engine.parallel",
        "engine.device",
        "engine.text",
        "engine.memory.ledger",
        "engine.models.spec",
    ),
    ("engine.layers",),
    ("engine.models", "engine.weights"),
    ("engine.lora",),
    ("engine.memory",),
    ("engine.runtime",),
    ("engine.scheduling",),
    ("engine.serving",),
    ("engine.bench",),
    (
        "engine.wiring",
        "engine.containers",
        "engine.wiring_check",
        "engine.wiring_diagram",
        "engine.wiring_graph",
        "engine.wiring_types",
    ),
    ("engine.server",),
    ("engine.commands",),
    ("engine.cli", "engine.__main__"),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
BARE = {"kernels", "containers", "conf"}
TEST_ORACLES = {"transformers", "peft", "jsonschema"}


def modules() -> list[Path]:
    """Every module of the engine, each link once, under its name inside engine/."""
    found = [path for path in ROOT.glob("engine/**/*.py") if "kernels" not in path.parts]
    return sorted([*found, *(ROOT / "engine" / "kernels").glob("*.py")])


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Full names of what is imported, at the top of the module or inside functions."""
    known = {name_of(module) for module in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module or "" for name in inner)


def level(name: str) -> int:
    """The level of the longest prefix that has one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:end])) in LEVEL_OF:
            if prefix == "engine" and end < len(parts):
                break
            return LEVEL_OF[prefix]
    raise AssertionError(f"{name} has no place in LEVELS")


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    name = name_of(path)
    for imported in imports(path):
        top = imported.partition(".")[0]
        assert top not in BARE, f"{name}: write engine.{imported}"
        assert top not in TEST_ORACLES, f"{name}: {top} is for tests only"
        if top == "engine":
            assert level(imported) <= level(name), f"{name} imports {imported}, which is above it"
            in_kernels = name.startswith("engine.kernels")
            assert not in_kernels or imported.startswith("engine.kernels"), f"{name} knows engine"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_say_what_they_own(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if tree.body:
        assert ast.get_docstring(tree), f"{path} opens without a docstring"


def test_no_long_files() -> None:
    ours = [ROOT / "containers.py"]
    for folder in ("engine", "kernels", "tests", "scripts"):
        ours += (ROOT / folder).rglob("*.py")
    lengths = {path: len(path.read_text().splitlines()) for path in ours}
    assert {path: count for path, count in lengths.items() if count > MAX_LINES} == {}


def test_top_level_folders_are_linked_into_the_package() -> None:
    for name in ("kernels", "conf", "containers.py"):
        link = ROOT / "engine" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "conf" / "__init__.py").exists()
