"""A second reader of adapter files, written apart from the engine's: it judges what the engine
accepted. Bytes are parsed here, names are found by pattern, nothing of `engine.lora` is used.
"""

import io
import json
import math
import re
import struct
import zipfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LAYER = re.compile(r"layers\.(\d+)\.(self_attn|mlp)\.(\w+)$")
KINDS = {
    "a": r"\.lora_A(\.\w+)?\.weight|\.lora_embedding_A(\.\w+)?",
    "b": r"\.lora_B(\.\w+)?\.weight|\.lora_embedding_B(\.\w+)?",
    "b_bias": r"\.lora_B(\.\w+)?\.bias",
    "magnitude": r"\.lora_magnitude_vector(\.\w+)?(\.weight)?",
    "frozen": r"\.base_layer\.weight",
    "bias": r"(\.base_layer)?\.bias",
    "weight": r"(\.modules_to_save(\.\w+)?)?\.weight",
}
# Fields that this reader uses, and those that say nothing about the numbers. Others must be unset.
READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias",
    "lora_bias", "use_dora", "modules_to_save", "init_lora_weights",
}  # fmt: skip
WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
EMPTY = (None, False, "", [], {})
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
Tensors = dict[str, torch.Tensor]


class Unreadable(Exception):
    """The file says something that this reader does not understand, or two things at once."""


@dataclass
class Found:
    """Dense deltas [out, in], replacing tensors and vectors by the base's modules, and how many
    pairs the file has. `lora_biases` are scaled.
    """

    deltas: Tensors = field(default_factory=dict)
    biases: Tensors = field(default_factory=dict)
    lora_biases: Tensors = field(default_factory=dict)
    magnitudes: Tensors = field(default_factory=dict)
    saved: Tensors = field(default_factory=dict)
    frozen: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    num_pairs: int = 0


def read(folder: Path, widths: dict[str, int]) -> Found:
    """What a folder holds; `widths`: output width of each module of the base by its split name.
    Raises Unreadable, and anything else on broken files.
    """
    config = read_json((folder / "adapter_config.json").read_bytes())
    _check_fields(config)
    sides: dict[str, Tensors] = {}
    paths: dict[str, str] = {}
    found = Found()
    saved_names = [name.split(".")[-1] for name in config.get("modules_to_save") or ()]
    for key, tensor in _tensors(folder).items():
        path, kind = _kind(key)
        module = _module(path)
        if not tensor.float().isfinite().all():
            raise Unreadable(f"{key} is not finite")
        if kind == "weight" and module.split(".")[-1] in saved_names:
            found.saved[module] = tensor
        elif kind in ("weight", "frozen"):
            found.frozen.append((module, tensor))
        elif paths.setdefault(module, path) != path or kind in sides.setdefault(module, {}):
            raise Unreadable(f"{module} is spelt in two ways or comes twice")
        else:
            sides.setdefault(module, {})[kind] = tensor
    for module, own in sides.items():
        _add(found, module, paths[module].removeprefix("base_model.model."), own, config, widths)
    return found


def read_json(raw: bytes) -> dict[str, Any]:
    """An object; no key of any object in it may come twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise Unreadable("a key comes twice")
        return dict(pairs)

    found = json.loads(raw, object_pairs_hook=unique)
    if not isinstance(found, dict):
        raise Unreadable(f"a {type(found)} is no object")
    return found


def read_safetensors(path: Path) -> Tensors:
    """The tensors of one file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = read_json(raw[8 : 8 + length])
    data = raw[8 + length :]
    header.pop("__metadata__", None)
    found = {}
    for key, entry in header.items():
        start, stop = entry["data_offsets"]
        flat = torch.frombuffer(bytearray(data[start:stop]), dtype=DTYPES[entry["dtype"]])
        found[key] = flat.view(entry["shape"])
    return found


def _tensors(folder: Path) -> Tensors:
    single = folder / "adapter_model.safetensors"
    if single.exists():
        return read_safetensors(single)
    index = folder / "adapter_model.safetensors.index.json"
    if index.exists():
        names = read_json(index.read_bytes())["weight_map"]
        found: Tensors = {}
        for shard in set(names.values()):
            found |= read_safetensors(folder / shard)
        return found
    return _read_archive(folder / "adapter_model.bin")


def _read_archive(path: Path) -> Tensors:
    """A state dict from an archive's records by their checksums: torch refuses some archives for
    bytes around them.
    """
    copy = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as clean:
        for info in archive.infolist():
            clean.writestr(info.filename, archive.read(info))
    copy.seek(0)
    return torch.load(copy, weights_only=True)  # type: ignore[no-any-return]


def _check_fields(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise Unreadable("not a LoRA")
    unknown = [k for k, v in config.items() if k not in READ | WITHOUT_EFFECT and v not in EMPTY]
    if unknown or config.get("init_lora_weights") not in PLAIN_STARTS:
        raise Unreadable(f"{unknown or 'init_lora_weights'} may change the numbers")


def _add(
    found: Found,
    module: str,
    path: str,
    own: Tensors,
    config: dict[str, Any],
    widths: dict[str, int],
) -> None:
    """What a module's tensors come to, member by member."""
    members = _members(module)
    sizes = [widths[member] for member in members]
    if "bias" in own:
        if (config.get("bias") or "none") == "none":
            raise Unreadable(f"{module}: a bias that the config does not speak of")
        found.biases |= dict(zip(members, own["bias"].float().split(sizes), strict=True))
    if own.keys() == {"bias"}:
        return
    found.num_pairs += 1
    rank, scale = _rank_and_scale(config, path, module)
    if own["a"].shape[0] != rank:
        raise Unreadable(f"{module}: rank {own['a'].shape[0]}, the config says {rank}")
    for kind, name in (("magnitude", "use_dora"), ("b_bias", "lora_bias")):
        if (kind in own) != bool(config.get(name)):
            raise Unreadable(f"{module}: {kind} and {name} disagree")
    delta = scale * (own["b"].float() @ own["a"].float())
    found.deltas |= dict(zip(members, delta.split(sizes), strict=True))
    if "magnitude" in own:
        parts = own["magnitude"].float().split(sizes)
        found.magnitudes |= dict(zip(members, parts, strict=True))
    if "b_bias" in own:
        parts = (scale * own["b_bias"].float()).split(sizes)
        found.lora_biases |= dict(zip(members, parts, strict=True))


def _members(module: str) -> list[str]:
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{name}" for name in FUSED[last]] if last in FUSED else [module]


def _kind(key: str) -> tuple[str, str]:
    for kind, pattern in KINDS.items():
        match = re.search(f"({pattern})$", key)
        if match:
            return key[: match.start()], kind
    raise Unreadable(key)


def _module(path: str) -> str:
    match = LAYER.search(path)
    if match:
        return f"model.layers.{match[1]}.{match[2]}.{match[3]}"
    for name, module in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
        if path.split(".")[-1] == name:
            return module
    raise Unreadable(path)


@cache
def _anchored(key: str) -> "re.Pattern[str]":
    return re.compile(rf"(.*\.)?({key})$")


def _rank_and_scale(config: dict[str, Any], *names: str) -> tuple[int, float]:
    def own(pattern: str, default: float) -> float:
        for key, value in (config.get(pattern) or {}).items():
            if any(_anchored(key).match(name) for name in names):
                return float(value)
        return default

    alpha = config.get("lora_alpha")
    rank = own("rank_pattern", config.get("r", 8))
    alpha = own("alpha_pattern", 8 if alpha is None else alpha)
    return int(rank), alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
