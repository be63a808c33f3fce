"""Makes the adapter of a recipe with PEFT: its files, and PEFT's logits of what the files hold."""

import json
import math
import re
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from adapter_space import MEMBERS, Recipe
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
PROMPT = [1, 267, 334, 339, 326, 344]
PEFT_PREFIX, ROOT = "base_model.model.", "model."
Tensors = dict[str, torch.Tensor]


def make(recipe: Recipe, folder: Path, bases: Path, seed: int) -> torch.Tensor | None:
    """Save the adapter with random weights; PEFT's logits [prompt, vocab] of what was stored, None
    where the recipe must be refused. Raises what PEFT raises on settings that it cannot combine.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            base_model(recipe.base, bases), LoraConfig(task_type="CAUSAL_LM", **recipe.fields)
        ).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        _tie(recipe, model, bases)
        folder.mkdir(parents=True)
        if recipe.form == "peft":
            model.save_pretrained(folder)
        else:
            stored = _rounded(recipe, model)
            model.peft_config["default"].save_pretrained(folder)
            _add_frozen(recipe, stored, bases)
            _save(recipe, _laid_out(recipe, stored, bases), folder)
        _change_config(recipe, folder)
        if recipe.cause:
            return None
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
        return logits


@cache
def base_folder(name: str, bases: Path) -> Path:
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


def base_model(name: str, bases: Path) -> Any:
    """The base in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(base_folder(name, bases), dtype=torch.float32)


def _rounded(recipe: Recipe, model: Any) -> Tensors:
    """PEFT's tensors in the recipe's dtypes; the model gets the rounded numbers."""
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    stored = {
        key: own[key].detach().to(recipe.dtypes[index % len(recipe.dtypes)])
        for index, key in enumerate(sorted(own))
    }
    set_peft_model_state_dict(model, {key: tensor.float() for key, tensor in stored.items()})
    return stored


def _add_frozen(recipe: Recipe, stored: Tensors, bases: Path) -> None:
    """A copy of the base's embedding or head beside the adapter's tensors."""
    name, how = recipe.frozen
    if not how:
        return
    model = base_model(recipe.base, bases)
    is_head = name == "lm_head"
    module = model.get_output_embeddings() if is_head else model.get_input_embeddings()
    weight = module.weight.detach().clone()
    if how == "rounded":
        weight = weight.to(torch.bfloat16)
    weight[3] += float(how == "other")
    path = f"{PEFT_PREFIX}{'' if is_head else ROOT}{name}"
    inner = ".base_layer" if any(key.startswith(f"{path}.lora_") for key in stored) else ""
    stored[f"{path}{inner}.weight"] = weight


def _change_config(recipe: Recipe, folder: Path) -> None:
    """The config in the file's spelling of modules, and with fields that PEFT does not write."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_bytes())
    if recipe.layout != "own":
        config["target_modules"] = sorted(_respelt(recipe, config["target_modules"]))
    if recipe.layout == "split_own":
        root = math.sqrt if config["use_rslora"] else float
        factor = config["lora_alpha"] / root(config["r"])
        for members in MEMBERS.values():
            rank = config["r"] // len(members)
            for name in members:
                config["rank_pattern"][name] = rank
                config["alpha_pattern"][name] = factor * root(rank)
    path.write_text(json.dumps(config | recipe.extra))


def _respelt(recipe: Recipe, names: list[str]) -> set[str]:
    if recipe.layout == "fused":
        groups = {member: group for group, members in MEMBERS.items() for member in members}
        return {groups.get(name, name) for name in names}
    return {member for name in names for member in MEMBERS.get(name, (name,))}


# ---------------------------------------------------------------------- other spellings


def _tie(recipe: Recipe, model: Any, bases: Path) -> None:
    """Make the weights such that the recipe's other spelling says the same."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        for group, members in MEMBERS.items():
            if recipe.layout == "fused" and "lora_A" in name:
                for member in members:
                    if f".{member}." in name:
                        parameter.copy_(parameters[name.replace(member, members[0])])
            if recipe.layout == "split_own" and f".{group}.lora_B" in name and parameter.dim() == 2:
                rank = parameter.shape[1] // len(members)
                start = 0
                for index, width in enumerate(_widths(recipe.base, bases)[group]):
                    kept = parameter[start : start + width, index * rank : (index + 1) * rank]
                    kept = kept.clone()
                    parameter[start : start + width] = 0
                    parameter[start : start + width, index * rank : (index + 1) * rank] = kept
                    start += width


def _widths(base: str, bases: Path) -> dict[str, list[int]]:
    """Output widths of the members of each fused module."""
    config = json.loads((base_folder(base, bases) / "config.json").read_bytes())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    keys = config["num_key_value_heads"] * head_dim
    return {
        "qkv_proj": [heads * head_dim, keys, keys],
        "gate_up_proj": [config["intermediate_size"]] * 2,
    }


def _laid_out(recipe: Recipe, stored: Tensors, bases: Path) -> Tensors:
    """The tensors in the file's spelling of modules."""
    if recipe.layout == "own":
        return stored
    found: Tensors = {}
    widths = _widths(recipe.base, bases)
    for key, tensor in stored.items():
        name = key.split(".lora_")[0].removesuffix(".bias").removesuffix(".base_layer")
        last = name.rpartition(".")[2]
        group = next((g for g, members in MEMBERS.items() if last in members or last == g), "")
        if not group:
            found[key] = tensor
        elif recipe.layout == "fused":
            keys = [key.replace(f".{last}.", f".{member}.") for member in MEMBERS[group]]
            if last == MEMBERS[group][0]:
                own = [stored[one] for one in keys]
                fused = tensor if "lora_A" in key else torch.cat(own)
                found[key.replace(f".{last}.", f".{group}.")] = fused
        else:
            parts = list(torch.split(tensor, widths[group])) if "lora_A" not in key else []
            parts = parts or [tensor] * len(MEMBERS[group])
            if recipe.layout == "split_own" and tensor.dim() == 2:
                by_rank = 0 if "lora_A" in key else 1
                count = len(parts)
                parts = [part.chunk(count, by_rank)[i] for i, part in enumerate(parts)]
            for member, part in zip(MEMBERS[group], parts, strict=True):
                found[key.replace(f".{group}.", f".{member}.")] = part
    return found


# ---------------------------------------------------------------------- files


def _save(recipe: Recipe, stored: Tensors, folder: Path) -> None:
    renamed = {_key(recipe, key): t.contiguous().clone() for key, t in stored.items()}
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


def _key(recipe: Recipe, key: str) -> str:
    """The key in the recipe's place, with the adapter's name where that may stand."""
    prefix, root = recipe.place
    path = key.removeprefix(PEFT_PREFIX)
    path = prefix + (root + path.removeprefix(ROOT) if path.startswith(ROOT) else path)
    if recipe.infix and ".lora_" in path:
        path = re.sub(r"(\.lora_[^.]+)(\.(weight|bias))?$", rf"\1{recipe.infix}\2", path)
    return path
