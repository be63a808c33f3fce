"""Adapter files that brought other servers down, or were served wrong: each is refused by name, and
the engine goes on serving what it served before, with the same numbers.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EngineMaker
from peft import LoraConfig, get_peft_model
from peft_oracle import PROMPT, base_model
from tests_support import prompt_logits, random_adapter

from engine.errors import AdapterError
from engine.serving.engine import Engine

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
GOOD = {f"{ATTENTION}.o_proj": (64, 64)}
# By what happened elsewhere: the base, modules (name -> (in, out)), and words of the refusal.
FOREIGN_MODULES: dict[str, tuple[str, dict[str, tuple[int, int]], str]] = {
    "the base fuses more than the names know": (
        "llama", {f"{ATTENTION}.in_proj_qkv": (64, 128), f"{ATTENTION}.in_proj_z": (64, 64)},
        "in_proj_qkv",
    ),
    "a part of a fused module beside a sound one": (
        "phi3_fused", {**GOOD, f"{ATTENTION}.qk_proj": (64, 96)}, "qk_proj"
    ),
    "a router on a dense base": ("llama", {**GOOD, f"{MLP}.gate": (64, 8)}, "mlp.gate.lora"),
    "an expert on a dense base": (
        "llama", {**GOOD, f"{MLP}.experts.0.gate_proj": (64, 128)}, "experts.0.gate_proj"
    ),
    "latent attention": ("llama", {f"{ATTENTION}.kv_a_proj_with_mqa": (64, 24)}, "kv_a_proj"),
    "a draft model's layers": ("llama", {"model.mtp.layers.0.self_attn.q_proj": (64, 64)}, "mtp"),
    "a vision tower": (
        "llama", {**GOOD, "vision_tower.layers.0.self_attn.q_proj": (64, 64)}, "vision_tower"
    ),
    "the head under another name": ("llama", {"model.unembed_tokens": (64, 512)}, "unembed_tokens"),
    "a fused and a split spelling at once": (
        "llama",
        {f"{ATTENTION}.qkv_proj": (64, 128), f"{ATTENTION}.k_proj": (64, 32)},
        "given twice",
    ),
}  # fmt: skip


@pytest.fixture
def engine(request: pytest.FixtureRequest, bases: Path, make_engine: EngineMaker) -> Iterator[Any]:
    """On the base that a test is parametrized with, serving an adapter; its numbers stay."""
    made = make_engine(bases / request.param)
    made.load_adapter_from_tensors("good", *random_adapter(GOOD, 4, 0))
    before = prompt_logits(made, PROMPT, "good")
    yield made
    assert [known.name for known in made.lora_manager.list_adapters()] == ["good"]
    assert torch.equal(prompt_logits(made, PROMPT, "good"), before)


@pytest.mark.parametrize(
    ("engine", "modules", "words"),
    [pytest.param(*case, id=name) for name, case in FOREIGN_MODULES.items()],
    indirect=["engine"],
)
def test_modules_that_the_base_does_not_have(
    engine: Engine, modules: dict[str, tuple[int, int]], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        engine.load_adapter_from_tensors("foreign", *random_adapter(modules, 4, 1))


@pytest.mark.parametrize("engine", ["llama", "llama_tied"], indirect=True)
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=["saved", "pair on the embedding", "pair on the head"],
)
def test_a_resized_vocabulary(
    engine: Engine, fields: dict[str, Any], bases: Path, tmp_path: Path, request: Any
) -> None:
    """Three tokens were added before training: both sizes are named."""
    name = request.node.callspec.params["engine"]
    model = base_model(name, bases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(515)
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields)).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="515") as refused:
        engine.load_adapter("resized", tmp_path)
    assert "512" in str(refused.value)


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_an_adapter_of_a_larger_base(engine: Engine) -> None:
    """The names fit, the widths do not: both are named, and the pool is the base's own."""
    receipt = engine.lora_manager.receipt
    tensors, config = random_adapter({f"{ATTENTION}.q_proj": (4096, 4096)}, 4, 1)
    with pytest.raises(AdapterError, match=r"\[4, 4096\].*\[rank, 64\]"):
        engine.load_adapter_from_tensors("larger", tensors, config)
    assert engine.lora_manager.receipt == receipt
