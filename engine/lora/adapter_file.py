"""Reads an adapter: a PEFT directory, or tensors from memory. All tensors are applied, or it is
refused.

A file is data: nothing in it is executed, nothing is fetched. All reasons are reported at once.
"""

import json
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.errors import AdapterError, first_few
from engine.lora.adapter import HostAdapter, LoRATarget
from engine.lora.adapter_build import NUM_SHOWN, build_adapter, refusal
from engine.lora.pickle_file import read_pickle

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PICKLED = "adapter_model.bin"
LFS_POINTER = b"version https://git-lfs"
MAX_JSON_BYTES = 32 << 20
SIZE_BYTES = 8  # a safetensors file begins with the size of its header
T = TypeVar("T")


def read_adapter(path: Path, targets: Mapping[str, LoRATarget]) -> HostAdapter:
    """The adapter in directory `path`. Raises AdapterError with the file and all reasons."""
    try:
        is_directory = path.is_dir()
    except (OSError, ValueError):  # a name that no system takes
        is_directory = False
    reasons: list[str] = []
    if not is_directory:
        raise refusal(str(path), ["no such directory; give a PEFT adapter directory"])
    config = _attempt(lambda: _read_json(path / CONFIG), reasons)
    tensors = _attempt(lambda: _read_tensors(path), reasons)
    if config is None or tensors is None:
        raise refusal(str(path), reasons)
    return build_adapter(str(path), tensors, config, targets)


def adapter_from_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    targets: Mapping[str, LoRATarget],
) -> HostAdapter:
    """The adapter of PEFT keys and an adapter_config.json's contents. Raises AdapterError."""
    return build_adapter("tensors", tensors, config, targets)


# ---------------------------------------------------------------------- files


def _attempt(read: Callable[[], T], reasons: list[str]) -> T | None:
    """What `read` returns, or None with the reason added: one broken file does not hide another."""
    try:
        return read()
    except AdapterError as refused:
        reasons.append(str(refused))
    except OSError as error:  # a disk that fails in the middle of a file
        reasons.append(f"a file cannot be read ({error.strerror})")
    return None


def _open(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """A plain file, opened. Pipes and devices are not touched: reading them may never end."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise AdapterError(f"{path.name}: is not a plain file")
        if max_bytes is not None and found.st_size > max_bytes:
            raise AdapterError(
                f"{path.name}: has {found.st_size} bytes, expected {max_bytes} at most"
            )
        file = path.open("rb")
        start = file.read(len(LFS_POINTER))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise AdapterError(f"{path.name}: cannot be read ({why}); it must exist") from error
    if start == LFS_POINTER:
        file.close()
        raise AdapterError(f"{path.name}: is a Git LFS pointer, not the file; run `git lfs pull`")
    file.seek(0)
    return file


def _read_json(path: Path) -> dict[str, Any]:
    with _open(path, MAX_JSON_BYTES) as file:
        return _parse(path, file.read())


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path.name}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{path.name}: holds a {type(found).__name__}, expected an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys must differ: the last of two would win in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = [name for name, count in counts.items() if count > 1]
        raise ValueError(f"{first_few(twice, NUM_SHOWN)} given twice")
    return found


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of one file, of indexed shards, or of a pickle read by torch's safe unpickler."""
    if (directory / WEIGHTS).exists():
        return _read_safetensors(directory / WEIGHTS)
    if (directory / INDEX).exists():
        return _read_shards(directory)
    if (directory / PICKLED).exists():
        return _read_pickle(directory / PICKLED)
    raise AdapterError(f"no weights; expected {WEIGHTS}, {INDEX} or {PICKLED}")


def _read_shards(directory: Path) -> dict[str, torch.Tensor]:
    index = directory / INDEX
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise AdapterError(f"{index.name}: has no weight_map of tensor names to file names")
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise AdapterError(f"{index.name}: names {shard!r}, outside its directory")
        found = _read_safetensors(directory / shard)
        misplaced = sorted(key for key in found if shards.get(key) != shard)
        if misplaced:
            raise AdapterError(
                f"{shard}: holds {first_few(misplaced, NUM_SHOWN)}, which the index "
                "places elsewhere"
            )
        tensors |= found
    missing = sorted(set(shards) - set(tensors))
    if missing:
        raise AdapterError(
            f"{index.name}: shards lack {first_few(missing, NUM_SHOWN)}, which the index names"
        )
    return tensors


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with _open(path) as file:
        size = int.from_bytes(file.read(SIZE_BYTES), "little")
        if size > MAX_JSON_BYTES:
            raise AdapterError(f"{path.name}: cannot be read (its header has {size} bytes)")
        header = file.read(size)
    if len(header) == size:  # else the library says what is wrong
        _parse(path, header)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise AdapterError(
            f"{path.name}: cannot be read ({error}); fetch the file again"
        ) from error


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    with _open(path):
        return read_pickle(path)
