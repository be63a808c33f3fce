"""What the engine makes of a mutated folder, judged by the second reader."""

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import torch
from conftest import tiny_config
from mutations import MARKER, MUTATIONS, WEIGHTS, config_fields
from reference_reader import FUSED, Found, Tensors, read, read_safetensors

from engine import wiring
from engine.errors import AdapterError
from engine.lora.adapter import HostAdapter
from engine.lora.adapter_file import read_adapter
from engine.lora.base import AdapterBase

HANG_SECONDS = 5.0
SPARE_BYTES = 3 << 30  # address space that reading one tiny adapter may take
MAX_MESSAGE_CHARS = 4000
OUTCOMES = ("refused", "right", "crash", "hang", "silent", "garbled")


class Hang(BaseException):
    """Raised in whatever runs for too long."""


@dataclass(frozen=True)
class Base:
    """A base model in the engine, and its folder."""

    engine: AdapterBase
    folder: Path

    @cached_property
    def weights(self) -> Tensors:
        """The file's tensors by split names, the tied head as well."""
        found = read_safetensors(self.folder / "model.safetensors")
        found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
        widths = {name: target.out_features for name, target in self.engine.targets.items()}
        for key in list(found):
            path, _, parameter = key.rpartition(".")
            parent, _, last = path.rpartition(".")
            if last in FUSED:
                members = [f"{parent}.{member}" for member in FUSED[last]]
                parts = found[key].split([widths[member] for member in members])
                found |= {f"{m}.{parameter}": p for m, p in zip(members, parts, strict=True)}
        return found

    def matrix(self, module: str) -> torch.Tensor:
        """[out, in] float32; the embedding's input is the token."""
        weight = self.weights[f"{module}.weight"].float()
        return weight.t() if module == "model.embed_tokens" else weight


def bases_in_engines(folder: Path) -> dict[str, Base]:
    """The bases under `folder`, each in an engine that takes any rank of the cases."""
    found = {}
    for path in sorted(folder.iterdir()):
        config = tiny_config(path, lora={"max_lora_rank": 512}, memory_bytes=128 << 20)
        found[path.name] = Base(wiring.build(config).lora_manager()._base, path)
    return found


@dataclass(frozen=True)
class Source:
    """A sound adapter and the base that it is for."""

    folder: Path
    base: str


def sources(cases: Path, made: Path, bases: dict[str, Base]) -> list[Source]:
    """Adapters in one weights file that load: the cases, and those under `made`, whose folders are
    called by base and a number.
    """
    found = [
        Source(case / "adapter", json.loads((case / "expected.json").read_text())["base"])
        for case in sorted(cases.iterdir())
    ]
    found += [Source(folder, folder.name.rpartition("-")[0]) for folder in sorted(made.iterdir())]
    return [
        source
        for source in found
        if source.base in bases
        and (source.folder / WEIGHTS).exists()
        and isinstance(load(source.folder, bases[source.base]), HostAdapter)
    ]


def load(folder: Path, base: Base) -> HostAdapter | AdapterError:
    """As the manager does it."""
    try:
        return base.engine.settle(read_adapter(folder, base.engine.targets))
    except AdapterError as refused:
        return refused


def mutate(source: Source, folder: Path, seed: int) -> str:
    """Make `folder` a mutated copy of a source; the kind of mutation."""
    draw = Random(seed)
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(source.folder, folder)
    kind = draw.choice(sorted(MUTATIONS))
    if draw.random() < 0.1:
        config_fields(folder, draw)
    MUTATIONS[kind](folder, draw)
    return kind


def judge(folder: Path, base: Base) -> tuple[str, str]:
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
        return _judge_message(str(adapter))
    try:
        fault = difference(folder, adapter, base)
    except Exception as error:
        fault = f"the second reader: {error!r}"
    return ("silent", fault) if fault else ("right", "")


def _judge_message(message: str) -> tuple[str, str]:
    """A refusal is one line that can be printed."""
    if len(message) > MAX_MESSAGE_CHARS:
        return "garbled", f"{len(message)} characters: {message[:80]}"
    if not message.isprintable():
        return "garbled", ascii(message)
    return "refused", message


def difference(folder: Path, adapter: HostAdapter, base: Base) -> str:
    """How what was loaded differs from what the file holds; empty if it doesn't."""
    widths = {name: target.out_features for name, target in base.engine.targets.items()}
    expected = read(folder, widths)
    if adapter.num_pairs_read != expected.num_pairs:
        return f"{adapter.num_pairs_read} pairs read, the file has {expected.num_pairs}"
    if adapter.num_pairs_applied != expected.num_pairs:
        return f"{adapter.num_pairs_applied} of {expected.num_pairs} pairs applied"
    pairs = adapter.pairs
    gains, added = _vectors(expected, base)
    parts: dict[str, tuple[Tensors, Tensors]] = {
        "delta": (
            {n: p.scaling * (p.b.float() @ p.a.float()) for n, p in pairs.items()},
            expected.deltas,
        ),
        "magnitude": (
            {n: p.magnitude for n, p in pairs.items() if p.magnitude is not None},
            expected.magnitudes,
        ),
        "bias": (dict(adapter.biases), expected.biases),
        "saved matrix": (dict(adapter.saved), expected.saved),
        "gain": ({n: v.gain for n, v in adapter.vectors.items() if v.gain is not None}, gains),
        "added bias": (
            {n: v.bias for n, v in adapter.vectors.items() if v.bias is not None},
            added,
        ),
    }
    for what, (found, wanted) in parts.items():
        if found.keys() != wanted.keys():
            return f"{what}: {sorted(found.keys() ^ wanted.keys())[:3]} are not in both"
        for name, tensor in wanted.items():
            if not torch.allclose(found[name].float(), tensor.float(), rtol=1e-4, atol=1e-5):
                return f"{what} of {name} differs"
    for module, stored in expected.frozen:
        own = base.weights[f"{module}.weight"]
        if not (torch.equal(own.to(stored.dtype), stored) or torch.equal(own, stored.to(own))):
            return f"a frozen copy of {module} is not the base's"
    return ""


def _vectors(expected: Found, base: Base) -> tuple[Tensors, Tensors]:
    """By module: what DoRA multiplies the output with, and what is added to it."""
    gains = {
        name: magnitude / (base.matrix(name) + expected.deltas[name]).double().norm(dim=1).float()
        for name, magnitude in expected.magnitudes.items()
    }
    added = {
        name: trained - base.weights[f"{name}.bias"].float()
        for name, trained in expected.biases.items()
    }
    for name, scaled in expected.lora_biases.items():
        added[name] = added[name] + scaled if name in added else scaled
    return gains, added


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang in what runs for longer, and let what takes SPARE_BYTES find no memory. Main
    thread only.
    """

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + SPARE_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)
