"""From keys of an adapter file to projections of the base.

A key is read from its end: what stands before the module's own path may only be wrappers that carry
no meaning. Fused names (qkv_proj, gate_up_proj) stand for their members.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.lora.adapter import LoRATarget

WRAPPERS = frozenset(("base_model", "model", "language_model"))
ROOT = "model"
PEFT_PREFIX = "base_model.model."
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# "<module>.lora_A.weight"; PEFT's in-memory names have the adapter's name before "weight".
_PAIR_KEY = re.compile(r"(?P<module>.+)\.(?P<side>lora_[AB])(\.(?P<adapter>[^.]+))?\.weight")


@dataclass(frozen=True, slots=True)
class PairKey:
    """One side of a pair: the module as the base calls it and as the file does, whether this is A
    or B, and the adapter's name where the key has one.
    """

    module: str
    file_module: str
    side: str
    adapter: str


def split_members(module: str) -> list[str]:
    """The projections that a module name stands for: itself, or the members of a fused one."""
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{member}" for member in FUSED[last]] if last in FUSED else [module]


def resolve(key: str, targets: Mapping[str, LoRATarget]) -> PairKey | None:
    """The pair side that `key` names, or None if it is none or its module is not in the base."""
    match = _PAIR_KEY.fullmatch(key)
    if match is None:
        return None
    parts = match["module"].split(".")
    for start in range(len(parts)):
        if not all(part in WRAPPERS for part in parts[:start]):
            break
        tail = ".".join(parts[start:])
        for module in (tail, f"{ROOT}.{tail}"):
            if all(member in targets for member in split_members(module)):
                file_module = match["module"].removeprefix(PEFT_PREFIX)
                return PairKey(module, file_module, match["side"], match["adapter"] or "")
    return None


def explain_unmatched(key: str) -> str:
    """Why a key that is no side of a known pair is refused."""
    if "lora_magnitude_vector" in key:
        return "DoRA magnitudes (use_dora) are not supported"
    if "lora_embedding_" in key or "embed_tokens" in key:
        return "adapted or stored embed_tokens are not supported"
    if "lm_head" in key:
        return "an adapted or stored lm_head is not supported"
    if key.endswith(".bias"):
        return "biases (bias, lora_bias) are not supported"
    return "the base has no such module"
