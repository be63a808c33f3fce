"""From keys of an adapter file to modules of the base.

A key is read from its end: what stands before the module's own path may only be wrappers that carry
no meaning. Fused names (qkv_proj, gate_up_proj) stand for their members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from engine.lora.adapter import EMBEDDING, HEAD, LoRATarget

WRAPPERS = frozenset(("base_model", "model", "language_model"))
ROOT = "model"
PEFT_PREFIX = "base_model.model."
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class Kind(Enum):
    """What a tensor is to its module. The values are the words of messages."""

    a = "lora_A"
    b = "lora_B"
    b_bias = "lora_B.bias"
    magnitude = "lora_magnitude_vector"
    bias = "bias"
    weight = "weight"
    frozen = "base_layer.weight"


# What stands behind a module's name, an adapter's name and "weight" taken off.
_SUFFIXES = {
    ("lora_A", "weight"): Kind.a,
    ("lora_B", "weight"): Kind.b,
    ("lora_B", "bias"): Kind.b_bias,
    ("lora_embedding_A", ""): Kind.a,
    ("lora_embedding_B", ""): Kind.b,
    ("lora_magnitude_vector", ""): Kind.magnitude,
    ("lora_magnitude_vector", "weight"): Kind.magnitude,
    ("base_layer", "bias"): Kind.bias,
    ("base_layer", "weight"): Kind.frozen,
    ("modules_to_save", "weight"): Kind.weight,
}
_MARKERS = frozenset(marker for marker, _ in _SUFFIXES)
_PARAMETERS = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a file: what its tensor is, the module as the base calls it and as the file spells
    it, and the adapter's name where the key has one.
    """

    kind: Kind
    module: str
    path: str
    adapter: str


def split_members(module: str) -> list[str]:
    """The projections that a module name stands for: itself, or the members of a fused one."""
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{member}" for member in FUSED[last]] if last in FUSED else [module]


def resolve(key: str, targets: Mapping[str, LoRATarget]) -> Key | None:
    """What `key` names, or None if it is nothing known or its module is not in the base."""
    parts = key.split(".")
    place = next((index for index, part in enumerate(parts) if part in _MARKERS), None)
    if place is None:
        found = {"weight": Kind.weight, "bias": Kind.bias}.get(parts[-1])
        return None if found is None else _known(found, parts[:-1], "", targets, "")
    marker, rest = parts[place], parts[place + 1 :]
    parameter = rest.pop() if rest and rest[-1] in _PARAMETERS else ""
    kind = _SUFFIXES.get((marker, parameter))
    named = len(rest) == 1 and marker != "base_layer"
    if kind is None or (rest and not named):
        return None
    return _known(kind, parts[:place], rest[0] if rest else "", targets, marker)


def _known(
    kind: Kind, path: Sequence[str], adapter: str, targets: Mapping[str, LoRATarget], marker: str
) -> Key | None:
    module = _module(".".join(path), targets)
    if module is None:
        return None
    is_embedding = module == EMBEDDING
    if kind in (Kind.a, Kind.b, Kind.b_bias) and is_embedding != ("embedding" in marker):
        return None
    if kind in (Kind.weight, Kind.frozen) and module not in (EMBEDDING, HEAD):
        return None
    return Key(kind, module, ".".join(path), adapter)


def _module(path: str, targets: Mapping[str, LoRATarget]) -> str | None:
    """The base's name of a module that a file calls `path`."""
    parts = path.split(".")
    for start in range(len(parts)):
        if not all(part in WRAPPERS for part in parts[:start]):
            break
        tail = ".".join(parts[start:])
        for module in (tail, f"{ROOT}.{tail}"):
            if all(member in targets for member in split_members(module)):
                return module
    return None


def explain_unmatched(key: str) -> str:
    """Why a key that names nothing known is refused."""
    if "trainable_tokens" in key or "token_adapter" in key:
        return "trained token rows (trainable_token_indices) are not supported"
    if key.endswith((".weight", ".bias")) and "lora_" not in key:
        return "neither a LoRA pair nor a supported trained or frozen tensor of the base"
    return "the base has no such module"
