"""Reads an adapter: a PEFT directory, or tensors from memory. All pairs are applied, or it is
refused.

A file is data: nothing in it is executed, nothing is fetched. All reasons are reported at once.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from loguru import logger
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.errors import AdapterError, first_few
from engine.lora.adapter import HostAdapter, LoRAPair, LoRATarget
from engine.lora.names import explain_unmatched, resolve, split_members
from engine.lora.peft_config import AdapterConfig, parse_config

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PICKLED = "adapter_model.bin"
LFS_POINTER = b"version https://git-lfs"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FLOATS8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
NUM_SHOWN = 3
T = TypeVar("T")


def read_adapter(path: Path, targets: Mapping[str, LoRATarget]) -> HostAdapter:
    """The adapter in directory `path`. Raises AdapterError with the file and all reasons."""
    if not path.is_dir():
        raise AdapterError(f"{path}: no such directory; give a PEFT adapter directory")
    reasons: list[str] = []
    config = _attempt(lambda: _read_json(path / CONFIG), reasons)
    tensors = _attempt(lambda: _read_tensors(path), reasons)
    if config is None or tensors is None:
        raise AdapterError("; ".join(reasons))
    return _build(str(path), tensors, config, targets)


def adapter_from_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    targets: Mapping[str, LoRATarget],
) -> HostAdapter:
    """The adapter of PEFT keys and an adapter_config.json's contents. Raises AdapterError."""
    return _build("tensors", tensors, config, targets)


# ---------------------------------------------------------------------- files


def _attempt(read: Callable[[], T], reasons: list[str]) -> T | None:
    """What `read` returns, or None with the reason added: one broken file does not hide another."""
    try:
        return read()
    except AdapterError as refused:
        reasons.append(str(refused))
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read ({error.strerror}); it must exist") from error
    _refuse_pointer(path, raw)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{path}: holds a {type(found).__name__}, expected an object")
    return found


def _refuse_pointer(path: Path, raw: bytes) -> None:
    if raw.startswith(LFS_POINTER):
        raise AdapterError(f"{path}: is a Git LFS pointer, not the file; run `git lfs pull`")


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of one file, of indexed shards, or of a pickle read by torch's safe unpickler."""
    if (directory / WEIGHTS).is_file():
        return _read_safetensors(directory / WEIGHTS)
    if (directory / INDEX).is_file():
        return _read_shards(directory)
    if (directory / PICKLED).is_file():
        return _read_pickle(directory / PICKLED)
    raise AdapterError(f"{directory}: no weights; expected {WEIGHTS}, {INDEX} or {PICKLED}")


def _read_shards(directory: Path) -> dict[str, torch.Tensor]:
    index = directory / INDEX
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise AdapterError(f"{index}: has no weight_map of tensor names to file names")
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise AdapterError(f"{index}: names {shard!r}, outside its directory")
        found = _read_safetensors(directory / shard)
        misplaced = sorted(key for key in found if shards.get(key) != shard)
        if misplaced:
            raise AdapterError(
                f"{directory / shard}: holds {first_few(misplaced, NUM_SHOWN)}, which the index "
                "places elsewhere"
            )
        tensors |= found
    missing = sorted(set(shards) - set(tensors))
    if missing:
        raise AdapterError(
            f"{directory}: shards lack {first_few(missing, NUM_SHOWN)}, which the index names"
        )
    return tensors


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with path.open("rb") as file:
            _refuse_pointer(path, file.read(len(LFS_POINTER)))
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise AdapterError(f"{path}: cannot be read ({error}); fetch the file again") from error


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        with path.open("rb") as file:
            _refuse_pointer(path, file.read(len(LFS_POINTER)))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except AdapterError:
        raise
    except Exception as error:  # torch's unpickler raises anything on broken input
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise AdapterError(
            f"{path}: is no plain state dict ({reason}); save the adapter as {WEIGHTS}"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(key, str) and isinstance(t, torch.Tensor) for key, t in found.items()
    ):
        raise AdapterError(f"{path}: is no plain state dict; save the adapter as {WEIGHTS}")
    return found


# ---------------------------------------------------------------------- pairs


@dataclass(slots=True)
class _Sides:
    """The tensors of one module of the file by side, and the module's names in file and base."""

    names: tuple[str, str]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def _build(
    where: str,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    targets: Mapping[str, LoRATarget],
) -> HostAdapter:
    parsed, reasons = parse_config(config)
    sides, unmatched = _sides(tensors, targets)
    reasons += unmatched
    pairs: dict[str, LoRAPair] = {}
    if not tensors:
        reasons.append("the weights hold no tensor")
    faults = [_pair_faults(module, own.tensors, targets) for module, own in sides.items()]
    reasons += _counted([fault for own in faults for fault in own], "faults of pairs")
    if parsed is not None:
        ranks = [_rank_faults(module, own, parsed) for module, own in sides.items()]
        reasons += _counted([fault for own in ranks for fault in own], "ranks")
    if parsed is None or reasons:
        shown = "; ".join(dict.fromkeys(reasons))
        raise AdapterError(f"{where}: the adapter is refused: {shown}")
    for key in parsed.unmatched_patterns([own.names for own in sides.values()]):
        logger.warning("lora: {}: pattern key {!r} matches no module of the file", where, key)
    for module, own in sides.items():
        for name, pair in _split(module, own, parsed, targets).items():
            if name in pairs:
                raise AdapterError(f"{where}: {name} is given twice, fused and on its own")
            pairs[name] = pair
    return HostAdapter(pairs, len(sides), len(sides))


def _sides(
    tensors: Mapping[str, torch.Tensor], targets: Mapping[str, LoRATarget]
) -> tuple[dict[str, _Sides], list[str]]:
    """Tensors by module and side, and the reasons against keys that are neither."""
    sides: dict[str, _Sides] = {}
    adapters: dict[str, str] = {}
    unmatched: dict[str, list[str]] = defaultdict(list)
    for key, tensor in tensors.items():
        found = resolve(key, targets)
        if found is None:
            unmatched[explain_unmatched(key)].append(key)
            continue
        adapters.setdefault(found.adapter, key)
        own = sides.setdefault(found.module, _Sides((found.file_module, found.module)))
        if found.side in own.tensors:
            unmatched[f"{found.module}.{found.side} is given twice"].append(key)
        else:
            own.tensors[found.side] = tensor
    if len(adapters) > 1:
        unmatched["keys of several adapters, expected one"] = list(adapters.values())
    return sides, [f"{why}: {first_few(keys, NUM_SHOWN)}" for why, keys in unmatched.items()]


def _counted(faults: list[str], what: str) -> list[str]:
    rest = [f"and {len(faults) - NUM_SHOWN} more {what}"] if len(faults) > NUM_SHOWN else []
    return faults[:NUM_SHOWN] + rest


def _pair_faults(
    module: str, own: Mapping[str, torch.Tensor], targets: Mapping[str, LoRATarget]
) -> list[str]:
    """What is wrong with one module's tensors themselves."""
    missing = [side for side in ("lora_A", "lora_B") if side not in own]
    if missing:
        return [f"{module} has no {missing[0]}"]
    faults = []
    for side, tensor in own.items():
        if tensor.is_meta or tensor.layout is not torch.strided:
            faults.append(f"{module}.{side} is sparse or without data, expected a dense matrix")
        elif tensor.dtype not in FLOATS + FLOATS8:
            faults.append(f"{module}.{side} has dtype {tensor.dtype}, expected a floating one")
        elif tensor.dim() != 2 or 0 in tensor.shape:
            faults.append(f"{module}.{side} has shape {list(tensor.shape)}, expected a matrix")
        elif not bool(tensor.float().isfinite().all()):
            faults.append(f"{module}.{side} holds numbers that are not finite")
    if faults:
        return faults
    a, b = own["lora_A"], own["lora_B"]
    members = [targets[name] for name in split_members(module)]
    expected = members[0].in_features, sum(member.out_features for member in members)
    if (a.shape[1], b.shape[0]) != expected or a.shape[0] != b.shape[1]:
        faults.append(
            f"{module}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, expected "
            f"[rank, {expected[0]}] and [{expected[1]}, rank]"
        )
    return faults


def _rank_faults(module: str, own: _Sides, config: AdapterConfig) -> list[str]:
    a = own.tensors.get("lora_A")
    expected = config.rank_of(own.names)
    if a is None or a.dim() != 2 or 0 in a.shape or a.shape[0] == expected:
        return []
    return [f"{module} has rank {a.shape[0]}, the config says {expected}"]


def _split(
    module: str,
    own: _Sides,
    config: AdapterConfig,
    targets: Mapping[str, LoRATarget],
) -> dict[str, LoRAPair]:
    """One pair per projection; members of a fused module share A and cut B by their widths."""
    a, b = _copied(own.tensors["lora_A"]), _copied(own.tensors["lora_B"])
    scaling = config.scaling_of(own.names)
    names = split_members(module)
    parts = torch.split(b, [targets[name].out_features for name in names])
    return {name: LoRAPair(a, part, scaling) for name, part in zip(names, parts, strict=True)}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, float8 as float32.

    What safetensors reads is a map of the file: without the copy, a file that is overwritten in
    place would change a loaded adapter, and one that is cut short would end the process.
    """
    dtype = torch.float32 if tensor.dtype in FLOATS8 else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()
