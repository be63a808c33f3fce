"""Paths and names that lead out of the adapter roots: each is refused with one clear message, and
nothing is loaded.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from front_support import BASE, DATA, Served, served_front

from engine.errors import ConfigError
from engine.server.paths import AdapterRoots

ADAPTER = DATA / "cases" / "c16_rank_1" / "adapter"


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_front(tmp_path_factory.mktemp("open"), resolve=True) as server:
        yield server


# A path, and the status of its refusal. OUTSIDE, ROOT stand for directories.
PATHS = {
    "parent": ("../outside", 400),
    "parent inside": ("lazy/../../outside", 400),
    "parent that stays": ("late/../lazy", 400),
    "absolute outside": ("OUTSIDE", 403),
    "absolute outside that is not there": ("OUTSIDE/nothing", 403),
    "system file": ("/etc/passwd", 403),
    "system directory": ("/etc", 403),
    "proc": ("/proc/self/root/etc", 403),
    "own directory through proc": ("/proc/self/cwd", 403),
    "link out": ("link", 403),
    "link out and on": ("link/sub", 403),
    "link to a file": ("file_link", 403),
    "link in a loop": ("loop", 403),
    "files that link out": ("linked_files", 403),
    "the root itself": ("ROOT", 403),
    "dot": (".", 403),
    "empty": ("", 400),
    "blank": ("   ", 404),
    "NUL": ("lazy\x00", 400),
    "NUL in the middle": ("la\x00zy", 400),
    "newline": ("lazy\n", 400),
    "escape": ("\x1b[31mlazy", 400),
    "override": ("lazy\u202e", 400),
    "file scheme": ("file:///etc", 400),
    "file scheme short": ("file:lazy", 400),
    "hub": ("hub:owner/name", 400),
    "demo": ("demo:pirate", 400),
    "http": ("http://127.0.0.1/lazy", 400),
    "https": ("HTTPS://example.com/a", 400),
    "s3": ("s3://bucket/lazy", 400),
    "windows": ("C:\\lazy", 400),
    "home": ("~/lazy", 400),
    "home of root": ("~root", 400),
    "long": ("a" * 5000, 400),
    "long name": ("a" * 300, 404),
    "deep": ("a/" * 1500 + "a", 404),
    "a file": ("lazy/adapter_config.json", 404),
    "encoded parent": ("%2e%2e/outside", 404),
    "other slashes": ("..\\outside", 404),
    "nothing there": ("nothing", 404),
    "environment": ("$HOME/lazy", 404),
}


def prepare(root: Path) -> Path:
    """Links in the root, and a directory outside with an adapter in it."""
    outside = root.parent / "outside"
    if not outside.exists():
        (outside / "sub").mkdir(parents=True)
        for file in ADAPTER.iterdir():
            (outside / file.name).write_bytes(file.read_bytes())
        (root / "link").symlink_to(outside)
        (root / "file_link").symlink_to(outside / "adapter_config.json")
        (root / "loop").symlink_to("loop")
        (root / "linked_files").mkdir()
        for file in ADAPTER.iterdir():
            (root / "linked_files" / file.name).symlink_to(outside / file.name)
    return outside


@pytest.mark.parametrize("case", sorted(PATHS))
def test_paths_that_lead_elsewhere(open_server: Served, case: str) -> None:
    path, status = PATHS[case]
    outside = prepare(open_server.root)
    path = path.replace("OUTSIDE", str(outside)).replace("ROOT", str(open_server.root))
    answer = open_server.load("mine", path)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith("lora_path: ") and error["param"] == "lora_path"
    assert "root:" not in answer.text and str(outside) not in error["message"]
    assert [info.name for info in open_server.client.adapters if info.name == "mine"] == []


def test_refusals_do_not_tell_what_exists_outside(open_server: Served) -> None:
    outside = prepare(open_server.root)
    texts = {
        open_server.load("mine", path).text
        for path in (str(outside), f"{outside}/nothing", "/etc", "/etc/shadow", "/nothing", "link")
    }
    assert len(texts) == 1


def test_links_that_stay_inside_are_fine(open_server: Served) -> None:
    root = open_server.root
    (root / "alias").symlink_to(root / "lazy")
    answer = open_server.load("inside", "alias")
    assert answer.status_code == 200, answer.text
    [info] = [info for info in open_server.client.adapters if info.name == "inside"]
    assert info.path == str((root / "lazy").resolve())
    body = {"lora_name": "inside"}
    assert open_server.http.post("/v1/unload_lora_adapter", json=body).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["", " ", BASE, f"{BASE}:x", "a\x00b", "a\nb", "../a", "a/../b", "/etc", "a//b", "x" * 257,
     "a\\b", " a", "."],
)  # fmt: skip
def test_names_that_no_adapter_may_have(open_server: Served, name: str) -> None:
    answer = open_server.load(name, "lazy")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_name"


@pytest.mark.parametrize(
    "model", ["link", "../outside", "linked_files", "lazy/../late", "/etc", "loop", "file_link",
              "lazy\x00", "./lazy", "lazy/", "demo:pirate", "file:lazy"],
)  # fmt: skip
def test_lazy_loading_by_name_stays_inside(open_server: Served, model: str) -> None:
    prepare(open_server.root)
    before = list(open_server.client.loads)
    answer = open_server.complete(model=model)
    assert answer.status_code == 404, answer.text
    assert open_server.client.loads == before


def test_without_roots_loading_by_path_is_off(tmp_path: Path) -> None:
    with served_front(tmp_path, roots=False, resolve=True) as server:
        answer = server.load("mine", "lazy")
        assert answer.status_code == 403 and "server.adapter_roots" in answer.text
        assert server.complete(model="lazy").status_code == 404


def test_a_root_that_is_no_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.adapter_roots: .* is no directory"):
        AdapterRoots([str(tmp_path / "nothing")])
