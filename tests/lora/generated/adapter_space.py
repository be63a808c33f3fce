"""Adapters that PEFT makes from random settings, with PEFT's own logits, and what the engine must
do with each: load it, or refuse it naming the cause.
"""

import json
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from tests_support import prompt_logits
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from engine.errors import AdapterError
from engine.serving.engine import Engine

logging.disable_progress_bar()
PROMPT = [1, 267, 334, 339, 326, 344]
BASE_NAMES = ("llama", "llama_tied", "qwen2_bias", "phi3_fused", "qwen3")
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
# Key prefixes in place of PEFT's "base_model.model.".
PREFIXES = ("base_model.model.", "", "base_model.model.language_model.", "language_model.")
# Fields that change the mathematics and are not supported, as a saved config holds them.
REFUSED_FIELDS: dict[str, Any] = {
    "layer_replication": [[0, 1], [0, 2]],
    "alora_invocation_tokens": [5, 6],
    "trainable_token_indices": {"embed_tokens": [1, 2]},
    "init_lora_weights": "pissa",
    "target_parameters": ["mlp.experts.down_proj"],
    "ensure_weight_tying": True,
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "kasa_config": {"beta": 1},
    "a_field_of_the_future": {"gamma": 0.5},
    "modules_to_save": ["norm"],
    "fan_in_fan_out": True,
}


@dataclass
class Recipe:
    """Settings of one adapter; `cause`: the word that its refusal must hold, empty if it loads."""

    base: str
    fields: dict[str, Any]
    dtypes: list[torch.dtype]
    prefix: str
    infix: str
    form: str
    cause: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    frozen_copy: str = ""

    @property
    def features(self) -> list[str]:
        """What is unusual about it, for the table of counts."""
        known = ("use_dora", "lora_bias", "use_rslora", "rank_pattern", "alpha_pattern",
                 "layers_to_transform", "exclude_modules", "modules_to_save")  # fmt: skip
        found = [name for name in known if self.fields.get(name)]
        targets = self.fields["target_modules"]
        found += [f"target {name}" for name in ("embed_tokens", "lm_head") if name in targets]
        if self.fields.get("bias", "none") != "none":
            found.append(f"bias {self.fields['bias']}")
        found.append(f"targets as {type(targets).__name__}")
        found += [f"{self.form} file", f"base {self.base}"]
        found += ["renamed keys"] * (self.prefix != PREFIXES[0] or bool(self.infix))
        found += [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(self.dtypes)]
        found += [f"{self.frozen_copy} frozen copy"] * bool(self.frozen_copy)
        return [*found, *(f"extra {name}" for name in self.extra)]


def draw_recipe(draw: Random) -> Recipe:
    """Any combination that PEFT itself can make."""
    base = draw.choice(BASE_NAMES)
    linears = FUSED if base == "phi3_fused" else SPLIT
    chosen = draw.sample(linears, draw.randint(1, len(linears)))
    targets: Any = list(chosen)
    style = draw.randrange(5)
    if style == 0:
        targets = rf".*\.({'|'.join(chosen)})"
    elif style == 1:
        targets = "all-linear"
    elif style == 2:
        targets = [f"self_attn.{n}" if n in ("o_proj", "q_proj") else n for n in chosen]
    fields: dict[str, Any] = {
        "target_modules": targets,
        "r": draw.randint(1, 24),
        "lora_alpha": draw.randint(1, 48),
        "use_rslora": draw.random() < 0.3,
    }
    vocabulary = isinstance(targets, list) and draw.random() < 0.35
    if vocabulary:
        targets += draw.choice([["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
    elif draw.random() < 0.25:
        fields["modules_to_save"] = draw.choice(
            [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]]
        )
    for name, low, high in (("rank_pattern", 1, 40), ("alpha_pattern", 1, 60)):
        if draw.random() < 0.3:
            keys = [*chosen, f"layers.1.self_attn.{chosen[0]}", r".*\.0\.mlp\..*", "no_such_module"]
            fields[name] = {
                key: draw.randint(low, high) for key in draw.sample(keys, draw.randint(1, 3))
            }
    if not vocabulary and draw.random() < 0.2:
        fields["layers_to_transform"] = draw.choice([0, 1, [1], [0, 1]])
        if targets != "all-linear" and draw.random() < 0.5:
            fields["layers_pattern"] = "layers"
    if len(chosen) > 1 and isinstance(targets, list) and draw.random() < 0.2:
        fields["exclude_modules"] = draw.choice([[chosen[0]], rf".*\.{chosen[0]}"])
    variant = draw.randrange(6)
    if variant == 0:
        fields["use_dora"] = True
    elif variant == 1 and "embed_tokens" not in targets:
        fields["lora_bias"] = True
    if base == "qwen2_bias" and draw.random() < 0.5:
        fields["bias"] = draw.choice(["lora_only", "all"])
    if isinstance(fields.get("layers_to_transform"), list | int) and isinstance(targets, str):
        del fields["layers_to_transform"]
        fields.pop("layers_pattern", None)
    recipe = Recipe(
        base,
        fields,
        draw.choices(DTYPES, k=draw.choice([1, 1, 2])),
        draw.choice(PREFIXES) if draw.random() < 0.4 else PREFIXES[0],
        ".default" if draw.random() < 0.15 else "",
        draw.choice(["safetensors", "safetensors", "sharded", "bin"]),
        extra={"a_future_field": draw.choice([None, False, [], {}])},
    )
    chance = draw.random()
    if chance < 0.2:
        name = draw.choice(sorted(REFUSED_FIELDS))
        recipe.extra[name] = REFUSED_FIELDS[name]
        recipe.cause = name
    elif chance < 0.3:
        recipe.frozen_copy = draw.choice(["equal", "other"])
        recipe.cause = "frozen" if recipe.frozen_copy == "other" else ""
    if not recipe.cause:
        recipe.extra.pop("a_future_field", None) if draw.random() < 0.5 else None
    return recipe


def make(recipe: Recipe, folder: Path, bases: Path, seed: int) -> torch.Tensor:
    """Save the adapter with random weights; PEFT's logits [prompt, vocab] of what was stored."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(_base(recipe.base, bases), LoraConfig(
            task_type="CAUSAL_LM", **recipe.fields)).eval()  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        own = {
            key: tensor.detach()
            for key, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
        }
        stored = {
            key: tensor.to(recipe.dtypes[index % len(recipe.dtypes)])
            for index, (key, tensor) in enumerate(sorted(own.items()))
        }
        set_peft_model_state_dict(model, {key: own.float() for key, own in stored.items()})
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    config = model.peft_config["default"].to_dict()
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()} | recipe.extra
    if recipe.frozen_copy:
        weight = _base(recipe.base, bases).get_input_embeddings().weight.detach().clone()
        weight[3] += float(recipe.frozen_copy == "other")
        name = "embed_tokens.base_layer" if "embed_tokens" in str(recipe.fields) else "embed_tokens"
        if "embed_tokens" not in (recipe.fields.get("modules_to_save") or ()):
            stored[f"base_model.model.model.{name}.weight"] = weight
        else:
            recipe.cause, recipe.frozen_copy = "", ""
    _save(recipe, stored, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config, default=str))
    return logits


def _save(recipe: Recipe, stored: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    renamed = {}
    for key, tensor in stored.items():
        key = recipe.prefix + key.removeprefix("base_model.model.")
        if recipe.infix and key.endswith("weight") and ".lora_" in key:
            key = key.removesuffix(".weight") + f"{recipe.infix}.weight"
        elif recipe.infix and ".lora_" in key and not key.endswith(".bias"):
            key += recipe.infix
        elif recipe.infix and key.endswith("lora_B.bias"):
            key = key.removesuffix(".bias") + f"{recipe.infix}.bias"
        renamed[key] = tensor.contiguous().clone()
    if recipe.form == "bin":
        torch.save(renamed, folder / "adapter_model.bin")
        return
    if recipe.form == "safetensors" or len(renamed) < 2:
        save_file(renamed, folder / "adapter_model.safetensors")
        return
    names = sorted(renamed)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: renamed[name] for name in own}, folder / shard)
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))


@cache
def _weights(name: str, bases: Path) -> Path:
    """A folder with the base; the one with qk-norm is made here."""
    if name != "qwen3":
        return bases / name
    folder = Path(tempfile.mkdtemp(prefix="qwen3-"))
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def base_folder(name: str, bases: Path) -> Path:
    """Where the engine finds a base of BASE_NAMES."""
    return _weights(name, bases)


def _base(name: str, bases: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(_weights(name, bases), dtype=torch.float32)


def check(recipe: Recipe, expected: torch.Tensor, folder: Path, engine: Engine) -> tuple[str, str]:
    """(outcome, fault): "loaded" or "refused", and what is wrong with that, if anything."""
    try:
        engine.load_adapter("made", folder)
    except AdapterError as refused:
        if recipe.cause and recipe.cause.split("_config")[0] in str(refused):
            return "refused", ""
        return "refused", f"refused, cause expected {recipe.cause!r}: {refused}"
    found = prompt_logits(engine, PROMPT, "made")
    engine.unload_adapter("made")
    if recipe.cause:
        return "loaded", f"loaded, a refusal for {recipe.cause!r} was expected"
    error = (found - expected).abs().max().item()
    limit = 1e-4 * max(1.0, expected.abs().max().item())
    return "loaded", "" if error <= limit else f"logits differ by {error:.2e}"


def make_engine_for(name: str, bases: Path) -> Engine:
    """An engine on a base, its pool large enough for every recipe."""
    from conftest import tiny_config

    from engine import wiring

    config = tiny_config(
        base_folder(name, bases),
        lora={"max_lora_rank": 64},
        memory={"prefix_cache": False},
        memory_bytes=128 << 20,
    )
    return wiring.build(config).engine()


def run_one(seed: int, bases: Path, engines: dict[str, Engine]) -> tuple[Recipe, str, str]:
    """Draw, make and check the adapter of a seed."""
    recipe = draw_recipe(Random(seed))
    if recipe.base not in engines:
        engines[recipe.base] = make_engine_for(recipe.base, bases)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "adapter"
        expected = make(recipe, folder, bases, seed)
        return recipe, *check(recipe, expected, folder, engines[recipe.base])


def run_many(count: int, seed: int, bases: Path) -> int:
    """Adapters of `count` seeds; prints counts by outcome and by feature, returns the status."""
    from loguru import logger

    logger.remove()
    engines: dict[str, Engine] = {}
    outcomes: Counter[str] = Counter()
    features: Counter[tuple[str, str]] = Counter()
    faults = []
    for own in range(seed, seed + count):
        try:
            recipe, outcome, fault = run_one(own, bases, engines)
        except ValueError as impossible:  # PEFT's own refusal of a combination
            outcomes["not possible in PEFT"] += 1
            features["not possible in PEFT", str(impossible)[:60]] += 1
            continue
        outcomes[outcome] += 1
        for feature in recipe.features:
            features[feature, outcome] += 1
        if fault:
            faults.append(f"seed {own}: {fault}; {recipe}")
    for (feature, outcome), number in sorted(features.items()):
        print(f"  {feature:<34} {outcome:<24} {number:>5}")
    print(dict(outcomes), f"{len(faults)} faults")
    for fault in faults[:20]:
        print("  ", fault)
    return 1 if faults else 0
