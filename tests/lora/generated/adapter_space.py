"""Random settings of adapters that PEFT can make, and what the engine must do with each: load it,
or refuse it naming the cause.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

BASE_NAMES = ("llama", "llama_tied", "qwen2_bias", "phi3_fused", "qwen3")
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
MEMBERS = {"qkv_proj": SPLIT[:3], "gate_up_proj": SPLIT[4:6]}
MAX_RANK = 96
PLAIN_DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*PLAIN_DTYPES, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
# What stands in a key for PEFT's "base_model.model." and for the base's own "model.".
PLACES = (
    ("base_model.model.", "model."), ("", "model."), ("", ""), ("base_model.model.", ""),
    ("base_model.model.", "language_model."), ("base_model.model.", "model.language_model."),
    ("base_model.model.language_model.", "model."), ("language_model.", "model."),
)  # fmt: skip
VOCABULARY = (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"])
# Fields that change the mathematics and are not supported: given to PEFT, or written into its file.
REFUSED_SETTINGS: tuple[dict[str, Any], ...] = (
    {"layer_replication": [[0, 1], [0, 2]]},
    {"trainable_token_indices": {"embed_tokens": [1, 2]}},
    {"trainable_token_indices": [3]},
    {"alora_invocation_tokens": [5, 6]},
    {"target_parameters": ["up_proj.weight"]},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_2"},
    {"init_lora_weights": "olora"},
    {"modules_to_save": ["norm"]},
    {"modules_to_save": ["lm_head", "input_layernorm"]},
)
REFUSED_FIELDS: dict[str, Any] = {
    "ensure_weight_tying": True,
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "velora_config": {"a": 1},
    "monteclora_config": {"a": 1},
    "kasa_config": {"beta": 1},
    "a_field_of_the_future": {"gamma": 0.5},
    "fan_in_fan_out": True,
    "init_lora_weights": "loftq",
    "modules_to_save": ["score"],
    "peft_type": "ADALORA",
    "bias": "some",
    "r": 97,
}


@dataclass
class Recipe:
    """Settings of one adapter; `cause`: the word that its refusal must hold, empty if it loads.

    `layout`: "own", or how a file spells modules that the base fuses or splits: "split" (shared A),
    "split_own" (an A for each member), "fused". `form`: a file's form, "peft" as PEFT saves it.
    """

    base: str
    fields: dict[str, Any]
    dtypes: list[torch.dtype] = field(default_factory=lambda: [torch.float32])
    place: tuple[str, str] = PLACES[0]
    infix: str = ""
    form: str = "safetensors"
    layout: str = "own"
    extra: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, str] = ("", "")
    cause: str = ""

    @property
    def features(self) -> list[str]:
        """What is unusual about it, for the table of counts."""
        known = ("use_dora", "lora_bias", "use_rslora", "rank_pattern", "alpha_pattern",
                 "layers_to_transform", "layers_pattern", "exclude_modules", "modules_to_save",
                 "init_lora_weights")  # fmt: skip
        found = [name for name in known if self.fields.get(name)]
        targets = self.fields["target_modules"]
        found += [f"target {name}" for name in ("embed_tokens", "lm_head") if name in targets]
        if self.fields.get("bias", "none") != "none":
            found.append(f"bias {self.fields['bias']}")
        found.append(f"targets as {type(targets).__name__}")
        found += [f"file {self.form}", f"base {self.base}", f"layout {self.layout}"]
        found += ["keys placed elsewhere"] * (self.place != PLACES[0])
        found += ["keys with the adapter's name"] * bool(self.infix)
        found += [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(self.dtypes)]
        found += [f"frozen copy, {self.frozen[1]}"] * bool(self.frozen[1])
        found += [f"refused for {self.cause}"] * bool(self.cause)
        return found


def draw_recipe(draw: Random) -> Recipe:
    """Any combination that PEFT itself can make."""
    base = draw.choice(BASE_NAMES)
    if draw.random() < 0.2:
        recipe = _other_layout(draw, base)
    else:
        recipe = Recipe(base, _fields(draw, base), draw.choices(DTYPES, k=draw.choice([1, 1, 2])))
    _draw_file(draw, recipe)
    chance = draw.random()
    if chance < 0.1:
        settings = draw.choice(REFUSED_SETTINGS)
        recipe.fields |= settings
        recipe.cause = next(iter(settings))
    elif chance < 0.2:
        recipe.cause = draw.choice(sorted(REFUSED_FIELDS))
        recipe.extra[recipe.cause] = REFUSED_FIELDS[recipe.cause]
    elif chance < 0.35 and recipe.form != "peft":
        recipe.frozen = (
            draw.choice(["embed_tokens", "lm_head"]),
            draw.choice(["equal", "equal", "rounded", "other"]),
        )
        recipe.cause = "frozen" if recipe.frozen[1] == "other" else ""
        if recipe.frozen[0] in (recipe.fields.get("modules_to_save") or ()):
            recipe.frozen, recipe.cause = ("", ""), ""
    elif chance < 0.38 and recipe.layout == "own":
        recipe.fields |= {"r": draw.randint(MAX_RANK + 1, MAX_RANK + 16), "rank_pattern": {}}
        recipe.cause = "max_lora_rank"
    return recipe


def _fields(draw: Random, base: str) -> dict[str, Any]:
    """What LoraConfig gets."""
    linears = FUSED if base == "phi3_fused" else SPLIT
    chosen = draw.sample(linears, draw.randint(1, len(linears)))
    targets: Any = list(chosen)
    style = draw.randrange(6)
    if style == 0:
        targets = rf".*\.({'|'.join(chosen)})"
    elif style == 1:
        targets = "all-linear"
    elif style == 2:
        targets = [f"self_attn.{n}" if n in ("o_proj", "q_proj") else n for n in chosen]
    elif style == 3:
        targets = [f"layers.{draw.randrange(2)}.{_parent(n)}.{n}" for n in chosen]
    fields: dict[str, Any] = {
        "target_modules": targets,
        "r": draw.choice([1, 2, 4, 8, 8, 16, 5, 12, 33, 64, MAX_RANK, draw.randint(1, MAX_RANK)]),
        "lora_alpha": draw.randint(1, 48),
        "use_rslora": draw.random() < 0.3,
    }
    _add_vocabulary(draw, fields)
    for name, high in (("rank_pattern", 40), ("alpha_pattern", 60)):
        if draw.random() < 0.3:
            keys = [*chosen, f"layers.1.{_parent(chosen[0])}.{chosen[0]}", r".*\.0\.mlp\..*",
                    "no_such_module", f"^model.layers.0.{_parent(chosen[0])}.{chosen[0]}",
                    "embed_tokens", "lm_head"]  # fmt: skip
            some = draw.sample(keys, draw.randint(1, 3))
            # Sorted, as PEFT saves them: the first that matches counts.
            fields[name] = {key: draw.randint(1, high) for key in sorted(some)}
    if isinstance(targets, list) and style != 3 and draw.random() < 0.2:
        fields["layers_to_transform"] = draw.choice([0, 1, [1], [0, 1]])
        if draw.random() < 0.5:
            fields["layers_pattern"] = draw.choice(["layers", ["layers"]])
    if len(chosen) > 1 and isinstance(targets, list) and draw.random() < 0.2:
        fields["exclude_modules"] = draw.choice([[chosen[0]], rf".*\.{chosen[0]}"])
    variant = draw.randrange(6)
    if variant < 2:
        fields["use_dora"] = True
    elif variant == 2 and "embed_tokens" not in targets:
        fields["lora_bias"] = True
    if base == "qwen2_bias" and draw.random() < 0.5:
        fields["bias"] = draw.choice(["lora_only", "all"])
    if draw.random() < 0.15:
        fields["init_lora_weights"] = draw.choice([False, "gaussian", "orthogonal"])
    return fields


def _parent(linear: str) -> str:
    return "self_attn" if linear in ("qkv_proj", *SPLIT[:4]) else "mlp"


def _add_vocabulary(draw: Random, fields: dict[str, Any]) -> None:
    """LoRA on embedding or head, or matrices of their own, or one of each."""
    targets = fields["target_modules"]
    if isinstance(targets, list) and draw.random() < 0.4:
        own = draw.choice(VOCABULARY)
        targets += own
        others = [name for name in ("embed_tokens", "lm_head") if name not in own]
        if others and draw.random() < 0.3:
            fields["modules_to_save"] = others
    elif draw.random() < 0.25:
        fields["modules_to_save"] = draw.choice(VOCABULARY)


def _other_layout(draw: Random, base: str) -> Recipe:
    """An adapter on all members of a fused module, in the file in the other spelling."""
    is_fused = base == "phi3_fused"
    groups = draw.choice([["qkv_proj"], ["gate_up_proj"], ["qkv_proj", "gate_up_proj"]])
    targets = [name for group in groups for name in ([group] if is_fused else MEMBERS[group])]
    fields: dict[str, Any] = {
        "target_modules": [*targets, *draw.choice([[], ["o_proj"], ["o_proj", "down_proj"]])],
        "r": 6 * draw.randint(1, 4),
        "lora_alpha": draw.randint(1, 48),
        "use_rslora": draw.random() < 0.3,
    }
    kind = draw.randrange(3)
    if kind < 2:
        fields["use_dora" if kind else "lora_bias"] = True
    if base == "qwen2_bias" and draw.random() < 0.5:
        fields["bias"] = "lora_only"
    layout = draw.choice(["split", "split_own"]) if is_fused else "fused"
    return Recipe(base, fields, [draw.choice(PLAIN_DTYPES)], layout=layout)


def _draw_file(draw: Random, recipe: Recipe) -> None:
    """How the tensors are stored and named."""
    recipe.form = draw.choice(["safetensors", "safetensors", "sharded", "bin", "peft"])
    if recipe.form == "peft" and recipe.layout == "own":
        recipe.dtypes = [torch.float32]
        return
    recipe.form = recipe.form.replace("peft", "safetensors")
    if draw.random() < 0.4:
        recipe.place = draw.choice(PLACES)
    recipe.infix = ".default" if draw.random() < 0.15 else ""
    recipe.extra = {"a_future_field": draw.choice([None, False, [], {}, ""])}
