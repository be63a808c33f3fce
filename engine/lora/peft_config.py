"""adapter_config.json as PEFT writes it: what decides rank and scaling, and what must be refused.

A field that changes the mathematics and is not implemented is refused by name; unknown fields are
ignored only while they are null, false or empty.
"""

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loguru import logger

from engine.errors import shown
from engine.lora.name_patterns import MAX_KEYS, MAX_SHOWN_CHARS, NamePatterns, pattern_fault

DEFAULT_RANK = 8  # PEFT's own defaults
DEFAULT_ALPHA = 8
# Fields that are read here, or only say which modules were adapted (the tensors say that too).
HANDLED = frozenset(
    [
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "bias",
        "lora_bias",
        "use_dora",
        "modules_to_save",
    ]
)
# Fields without effect on what a saved adapter computes.
INERT = frozenset(
    [
        "peft_type",
        "task_type",
        "peft_version",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
    ]
)
BIASES = ("none", "lora_only", "all")
SAVABLE = ("embed_tokens", "lm_head")
# Initializations that leave the base as it was; others take a part of it into the adapter.
PLAIN_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank and alpha, with patterns by module name in PEFT's matching, and what a file must hold
    beside pairs: trained biases (`bias` is none, lora_only or all), lora_B's biases, magnitudes,
    whole modules by the last part of their name.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: NamePatterns
    alpha_pattern: NamePatterns
    bias: str = "none"
    lora_bias: bool = False
    use_dora: bool = False
    saved_modules: tuple[str, ...] = ()

    def rank_of(self, names: Iterable[str]) -> int:
        """The rank that the config gives a module, by the names it has in the file and the base."""
        return int(self.rank_pattern.number(names, self.rank))

    def scaling_of(self, names: Iterable[str]) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA, both the module's own."""
        rank, alpha = self.rank_of(names), self.alpha_pattern.number(names, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def unmatched_patterns(self, modules: Collection[Iterable[str]]) -> list[str]:
        """Pattern keys that name none of the modules, each given by its names."""
        ranks, alphas = (p.unmatched(modules) for p in (self.rank_pattern, self.alpha_pattern))
        return list(dict.fromkeys([*ranks, *alphas]))


def parse_config(config: Mapping[str, Any]) -> tuple[AdapterConfig | None, list[str]]:
    """The config, or None with all reasons why it is refused."""
    reasons = _refused_fields(config)
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        reasons.insert(0, f"peft_type is {peft_type!r}, expected 'LORA'")
    rank = config.get("r", DEFAULT_RANK)
    if not _is_rank(rank):
        reasons.append(f"r is {rank!r}, expected a whole number above 0")
    alpha = config.get("lora_alpha")
    if alpha is None:
        logger.warning(
            "lora: no lora_alpha in the config, PEFT's default {} is used", DEFAULT_ALPHA
        )
        alpha = DEFAULT_ALPHA
    if not _is_number(alpha):
        reasons.append(f"lora_alpha is {alpha!r}, expected a number")
    patterns = {}
    for name in ("rank_pattern", "alpha_pattern"):
        patterns[name], reason = _pattern(name, config.get(name))
        reasons += [reason] if reason else []
    flags = {}
    for name in ("use_rslora", "lora_bias", "use_dora"):
        flags[name] = config.get(name) or False
        if not isinstance(flags[name], bool):
            reasons.append(f"{name} is {flags[name]!r}, expected true or false")
    if flags["lora_bias"] and flags["use_dora"]:
        reasons.append("lora_bias and use_dora are both set, which PEFT does not define")
    bias = config.get("bias") or "none"
    if bias not in BIASES:
        reasons.append(f"bias is {bias!r}, expected one of {', '.join(BIASES)}")
    saved, reason = _saved_modules(config.get("modules_to_save"))
    reasons += [reason] if reason else []
    if reasons:
        return None, reasons
    return AdapterConfig(
        rank,
        float(alpha),
        flags["use_rslora"],
        NamePatterns(patterns["rank_pattern"]),
        NamePatterns(patterns["alpha_pattern"]),
        bias,
        flags["lora_bias"],
        flags["use_dora"],
        saved,
    ), []


def _saved_modules(value: Any) -> tuple[tuple[str, ...], str]:
    """Last parts of the names in modules_to_save, or why they are refused."""
    names = value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return (), f"modules_to_save is {value!r}, expected a list of module names"
    found = tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))
    others = [name for name in found if name not in SAVABLE]
    if others:
        return (), f"modules_to_save={others} is not supported, only {', '.join(SAVABLE)} are"
    return found, ""


def _refused_fields(config: Mapping[str, Any]) -> list[str]:
    reasons = []
    for name, value in config.items():
        if name in HANDLED or name in INERT:
            continue
        if name == "init_lora_weights":
            if value not in PLAIN_INITIALIZATIONS:
                reasons.append(
                    f"init_lora_weights={value!r} changes the base weights; convert the adapter to "
                    "a plain LoRA when saving (path_initial_model_for_weight_conversion)"
                )
        elif _is_set(value):
            reasons.append(f"{name}={value!r} is not supported")
    return reasons


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ({}, [], "")


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # false for nan, and for a huge int


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 1


def _pattern(name: str, value: Any) -> tuple[dict[str, Any], str]:
    if value is None:
        return {}, ""
    fits, numbers = (_is_rank, "ranks") if name == "rank_pattern" else (_is_number, "numbers")
    if not isinstance(value, dict) or not all(fits(item) for item in value.values()):
        return {}, f"{name} is {value!r}, expected module names with {numbers}"
    if len(value) > MAX_KEYS:
        return {}, f"{name} has {len(value)} keys, at most {MAX_KEYS} are supported"
    for key in value:
        if fault := pattern_fault(key):
            return {}, f"{name}: {shown(repr(key), MAX_SHOWN_CHARS)} {fault}"
    return value, ""
