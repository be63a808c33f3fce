"""A second reader of adapter files, written apart from the engine's: it judges what the engine
accepted. Bytes are parsed here, names are found by pattern, nothing of `engine.lora` is used.
"""

import json
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LAYER = re.compile(r"layers\.(\d+)\.(self_attn|mlp)\.(\w+)$")


class Unreadable(Exception):
    """The file says something that this reader does not understand."""


@dataclass
class Found:
    """Dense deltas, replacing tensors and vectors by the base's modules, and the file's pairs."""

    deltas: dict[str, torch.Tensor] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    lora_biases: dict[str, torch.Tensor] = field(default_factory=dict)
    magnitudes: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    num_pairs: int = 0


def read(folder: Path, widths: dict[str, int]) -> Found:
    """What a folder holds; `widths`: output width of each module of the base by its split name."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    tensors = _tensors(folder)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    paths: dict[str, str] = {}
    found = Found()
    for key, tensor in tensors.items():
        path, kind = _kind(key)
        module = _module(path)
        if kind in ("weight", "frozen"):
            listed = [name.split(".")[-1] for name in config.get("modules_to_save") or ()]
            if kind == "weight" and module.split(".")[-1] in listed:
                found.saved[module] = tensor
            else:
                found.frozen.append((module, tensor))
            continue
        if module in paths and paths[module] != path:
            raise Unreadable(f"{module} is spelt in two ways")
        paths[module] = path
        if kind in sides.setdefault(module, {}):
            raise Unreadable(f"{module}.{kind} comes twice")
        sides[module][kind] = tensor
    for module, own in sides.items():
        members = _members(module)
        sizes = [widths[member] for member in members]
        if "bias" in own:
            found.biases |= dict(zip(members, own["bias"].float().split(sizes), strict=True))
        if "a" not in own:
            continue
        found.num_pairs += 1
        scale = _scale(config, paths[module].removeprefix("base_model.model."), module)
        delta = scale * (own["b"].float() @ own["a"].float())
        found.deltas |= dict(zip(members, delta.split(sizes), strict=True))
        for kind, target in (("magnitude", found.magnitudes), ("b_bias", found.lora_biases)):
            if kind in own:
                parts = own[kind].float().split(sizes)
                target |= dict(zip(members, parts, strict=True))
    return found


def _members(module: str) -> list[str]:
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{name}" for name in FUSED[last]] if last in FUSED else [module]


def _kind(key: str) -> tuple[str, str]:
    patterns = {
        "a": r"\.lora_A(\.\w+)?\.weight|\.lora_embedding_A(\.\w+)?",
        "b": r"\.lora_B(\.\w+)?\.weight|\.lora_embedding_B(\.\w+)?",
        "b_bias": r"\.lora_B(\.\w+)?\.bias",
        "magnitude": r"\.lora_magnitude_vector(\.\w+)?(\.weight)?",
        "frozen": r"\.base_layer\.weight",
        "bias": r"(\.base_layer)?\.bias",
        "weight": r"(\.modules_to_save(\.\w+)?)?\.weight",
    }
    for kind, pattern in patterns.items():
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


def _scale(config: dict[str, Any], *names: str) -> float:
    def own(pattern: str, default: float) -> float:
        for key, value in (config.get(pattern) or {}).items():
            if any(re.match(rf"(.*\.)?({key})$", name) for name in names):
                return float(value)
        return default

    alpha = config.get("lora_alpha")
    rank = own("rank_pattern", config.get("r", 8))
    alpha = own("alpha_pattern", 8 if alpha is None else alpha)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    single = folder / "adapter_model.safetensors"
    if single.exists():
        return _safetensors(single)
    index = folder / "adapter_model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_bytes())["weight_map"]
        found: dict[str, torch.Tensor] = {}
        for shard in set(names.values()):
            found |= _safetensors(folder / shard)
        return found
    return torch.load(folder / "adapter_model.bin", weights_only=True)  # type: ignore[no-any-return]


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    pairs = json.loads(raw[8 : 8 + length], object_pairs_hook=lambda items: items)
    data = raw[8 + length :]
    found = {}
    for key, items in pairs:
        if key == "__metadata__":
            continue
        entry = dict(items)
        start, stop = entry["data_offsets"]
        flat = torch.frombuffer(bytearray(data[start:stop]), dtype=DTYPES[entry["dtype"]])
        found[key] = flat.view(entry["shape"])
    return found
