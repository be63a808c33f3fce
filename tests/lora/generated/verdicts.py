"""What the engine makes of a mutated folder, judged by the second reader."""

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from mutations import MARKER, MUTATIONS, WEIGHTS
from reference_reader import read

from engine.errors import AdapterError
from engine.lora.adapter import HostAdapter
from engine.lora.adapter_file import read_adapter
from engine.lora.base import AdapterBase

HANG_SECONDS = 5.0
OUTCOMES = ("refused", "right", "crash", "hang", "silent")


class Hang(BaseException):
    """Raised in whatever runs for too long."""


def sources(cases: Path, bases: dict[str, AdapterBase], base_of: dict[str, str]) -> list[Path]:
    """Folders of adapters that load, with one weights file."""
    return [
        folder
        for folder in sorted(case / "adapter" for case in cases.iterdir())
        if base_of[folder.parent.name] in bases
        and (folder / WEIGHTS).exists()
        and isinstance(load(folder, bases[base_of[folder.parent.name]]), HostAdapter)
    ]


def load(folder: Path, base: AdapterBase) -> HostAdapter | AdapterError:
    """As the manager does it."""
    try:
        return base.settle(read_adapter(folder, base.targets))
    except AdapterError as refused:
        return refused


def mutate(source: Path, folder: Path, seed: int) -> str:
    """Make `folder` a mutated copy of `source`; the kind of mutation."""
    draw = Random(seed)
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(source, folder)
    kind = draw.choice(sorted(MUTATIONS))
    MUTATIONS[kind](folder, draw)
    return kind


def judge(folder: Path, base: AdapterBase) -> tuple[str, str]:
    """One of OUTCOMES, and a word on it."""
    try:
        with limited(HANG_SECONDS):
            adapter = load(folder, base)
    except Hang:
        return "hang", ""
    except BaseException as error:
        return "crash", repr(error)
    if Path(MARKER).exists():
        return "crash", "code of a pickle was executed"
    if isinstance(adapter, AdapterError):
        return "refused", str(adapter)
    try:
        fault = difference(folder, adapter, base)
    except Exception as error:
        fault = f"the second reader: {error!r}"
    return ("silent", fault) if fault else ("right", "")


def difference(folder: Path, adapter: HostAdapter, base: AdapterBase) -> str:
    """How what was loaded differs from what the file holds; empty if it doesn't."""
    widths = {name: target.out_features for name, target in base.targets.items()}
    expected = read(folder, widths)
    if adapter.num_pairs_read != expected.num_pairs:
        return f"{adapter.num_pairs_read} pairs read, the file has {expected.num_pairs}"
    if adapter.num_pairs_applied != expected.num_pairs:
        return f"{adapter.num_pairs_applied} of {expected.num_pairs} pairs applied"
    pairs = adapter.pairs
    parts: list[tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = [
        ("delta", {n: p.scaling * (p.b.float() @ p.a.float()) for n, p in pairs.items()},
         expected.deltas),
        ("magnitude", {n: p.magnitude for n, p in pairs.items() if p.magnitude is not None},
         expected.magnitudes),
        ("lora_B.bias", {n: p.bias for n, p in pairs.items() if p.bias is not None},
         expected.lora_biases),
        ("bias", dict(adapter.biases), expected.biases),
        ("saved", dict(adapter.saved), expected.saved),
    ]  # fmt: skip
    for what, found, wanted in parts:
        if found.keys() != wanted.keys():
            return f"{what}: {sorted(found.keys() ^ wanted.keys())[:3]} are not in both"
        for name, tensor in wanted.items():
            if not torch.allclose(found[name].float(), tensor.float(), rtol=1e-4, atol=1e-6):
                return f"{what} of {name} differs"
    for module, stored in expected.frozen:
        matrix = torch.cat([columns for _, columns in base._columns(module)], 1)
        own = matrix if module == "lm_head" else matrix.t()
        if not torch.equal(own.to(stored.dtype), stored):
            return f"a frozen copy of {module} is not the base's"
    return ""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang in what runs for longer. Main thread only."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
