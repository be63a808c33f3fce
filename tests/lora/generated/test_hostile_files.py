"""Files that are made to stop a reader, to fill its memory or to say two things at once: each is
refused with one short line, at once.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EngineMaker
from mutations import CONFIG, INDEX, PICKLED, WEIGHTS
from safetensors.torch import load_file
from verdicts import Base, difference, judge, load

from engine.errors import AdapterError

CASE = "c00_control_all7"
Change = Callable[[Path], Any]


@pytest.fixture
def folder(cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound adapter."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(cases / CASE / "adapter", tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def base(bases: Path, make_engine: EngineMaker) -> Base:
    return Base(make_engine(bases / "llama").lora_manager._base, bases / "llama")


def config(**fields: Any) -> Change:
    """A change of fields of the config."""

    def change(folder: Path) -> None:
        known = json.loads((folder / CONFIG).read_bytes())
        (folder / CONFIG).write_text(json.dumps(known | fields))

    return change


def replaced(name: str, make: Change) -> Change:
    """A change of one file for what `make` puts at its path."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def sharded(make: Change) -> Change:
    """A change of the weights for one shard, which `make` puts at its path."""

    def change(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / WEIGHTS), "one")
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
        (folder / WEIGHTS).unlink()
        make(folder / "one")

    return change


def a_field_twice_among_many(folder: Path) -> None:
    names = [*(f"k{index}" for index in range(60_000)), "k7"]
    (folder / CONFIG).write_text("{" + ", ".join(f'"{name}": null' for name in names) + "}")


def a_file_of_gigabytes(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 1 << 35)


def a_view_of_one_number(*shape: int) -> Change:
    """A pickle whose tensors show far more numbers than they store."""

    def change(folder: Path) -> None:
        tensors: dict[str, torch.Tensor] = dict(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        for name in [key for key in tensors if "q_proj" in key]:
            tensors[name] = torch.ones(1, dtype=torch.float16).expand(*shape)
        torch.save(tensors, folder / PICKLED)

    return change


def a_header_with_a_key_twice(folder: Path) -> None:
    """The places of two tensors are swapped behind their first entries."""
    raw = (folder / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    one, other, *_ = [name for name in header if "q_proj.lora_A" in name]
    more = {one: header[other], other: header[one]}
    text = f"{json.dumps(header)[:-1]}, {json.dumps(more)[1:]}".encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


SLOW = "(.|.){18}!|x"
HOSTILE: dict[str, tuple[Change, str]] = {
    "a config that never comes": (replaced(CONFIG, os.mkfifo), "plain file"),
    "a config that never ends": (replaced(CONFIG, lambda p: p.symlink_to("/dev/zero")), "plain"),
    "a config that cannot be read": (
        replaced(CONFIG, lambda path: path.symlink_to("/proc/self/mem")), "cannot be read"
    ),
    "a config of gigabytes": (replaced(CONFIG, a_file_of_gigabytes), "bytes"),
    "a shard that never comes": (sharded(os.mkfifo), "one"),
    "a shard that never ends": (sharded(lambda path: path.symlink_to("/dev/zero")), "one"),
    "a field twice among many": (a_field_twice_among_many, "k7 given twice"),
    "many unknown fields": (config(**{f"k{i}": 1 for i in range(10_000)}), "more reasons"),
    "a long value": (config(layer_replication=[0] * 1_000_000), "layer_replication"),
    "a long name": (config(**{"x" * 1_000_000: 1}), "xxx"),
    "names that cannot be printed": (config(**{"\ud800\nforged line": 1}), r"\ud800\nforged line"),
    "patterns that end in the long run": (
        config(alpha_pattern={f"{SLOW}{index}": 4 for index in range(500)}), "write it plainly"
    ),
    "a pattern that grows": (config(rank_pattern={"(((a{1000}){1000}){1000})": 4}), "repeats"),
    "a pattern of many brackets": (config(rank_pattern={"(" * 900 + ")" * 900: 4}), "regular"),
    "a pattern of many more": (config(rank_pattern={"(" * 9000 + ")" * 9000: 4}), "characters"),
    "a pattern of huge counts": (config(rank_pattern={"a{99999999999}": 4}), "repeats"),
    "a fuzzy pattern": (config(alpha_pattern={"(?:xq_proj){e<=1}": 4}), "ambiguous"),
    "a pattern of named sets": (config(alpha_pattern={"[[:alpha:]]_proj": 4}), "ambiguous"),
    "terabytes in one number": (a_view_of_one_number(1 << 20, 1 << 20), "q_proj.lora_A"),
    "gigabytes in one number": (a_view_of_one_number(1 << 17, 1 << 15), "q_proj.lora_A"),
    "a header with a key twice": (a_header_with_a_key_twice, "given twice"),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_a_hostile_file_is_refused_at_once(kind: str, folder: Path, base: Base) -> None:
    change, word = HOSTILE[kind]
    change(folder)
    outcome, message = judge(folder, base)
    assert outcome == "refused" and word in message, (outcome, message)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "/dev/null", "/dev/null/x"])
def test_a_path_that_is_no_directory(path: str, base: Base) -> None:
    assert isinstance(load(Path(path), base), AdapterError)


def test_patterns_for_every_module_of_a_large_base_are_quick(folder: Path, base: Base) -> None:
    """One key for each of 1,000 modules, as an allocation of ranks writes them."""
    ranks = {f"layers.{layer}.self_attn.q_proj": 8 for layer in reversed(range(1000))}
    own = json.loads((folder / CONFIG).read_bytes())["r"]
    config(rank_pattern=dict.fromkeys(ranks, own), alpha_pattern=ranks)(folder)
    assert judge(folder, base) == ("right", "")


def test_the_second_reader_notices_what_is_wrong(folder: Path, base: Base) -> None:
    """It is the judge of all mutated files: numbers that differ from the file's are found."""
    assert judge(folder, base) == ("right", "")
    adapter = load(folder, base)
    assert not isinstance(adapter, AdapterError)
    name, pair = next(iter(adapter.pairs.items()))
    wrong = [
        replace(adapter, pairs=dict(list(adapter.pairs.items())[1:])),
        replace(adapter, pairs=adapter.pairs | {name: replace(pair, scaling=2 * pair.scaling)}),
        replace(adapter, pairs=adapter.pairs | {name: replace(pair, b=pair.b.flip(0))}),
        replace(adapter, num_pairs_applied=adapter.num_pairs_read - 1),
        replace(adapter, biases={name: pair.b[:, 0]}),
        replace(adapter, saved={"lm_head": pair.b}),
    ]
    assert all(difference(folder, own, base) for own in wrong)
    assert not difference(folder, adapter, base)
