"""Kinds of adapters beyond pairs on linear layers, made by PEFT and compared with PEFT's logits:
alone, and all kinds in one batch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests_support import prompt_logits
from transformers import AutoModelForCausalLM

from engine.config import KernelsConfig, KernelSet

PROMPT = [1, 267, 334, 339, 326, 344, 330]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": LINEARS}),
    "dora": ("llama", {"target_modules": LINEARS, "use_dora": True}),
    "dora_fused": ("phi3_fused", {"target_modules": FUSED, "use_dora": True}),
    "dora_biased": (
        "qwen2_bias",
        {"target_modules": LINEARS, "use_dora": True, "bias": "lora_only"},
    ),
    "dora_vocabulary": (
        "llama",
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    ),
    "lora_bias": ("llama", {"target_modules": LINEARS, "lora_bias": True}),
    "lora_bias_head": ("llama", {"target_modules": ["q_proj", "lm_head"], "lora_bias": True}),
    "bias_lora_only": ("qwen2_bias", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "bias_all": ("qwen2_bias", {"target_modules": ["q_proj"], "bias": "all"}),
    "both_biases": (
        "qwen2_bias",
        {"target_modules": LINEARS, "bias": "lora_only", "lora_bias": True},
    ),
    "vocabulary": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied_embedding": ("llama_tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied_head": ("llama_tied", {"target_modules": ["q_proj", "lm_head"]}),
    "saved_head": ("llama", {"target_modules": LINEARS, "modules_to_save": ["lm_head"]}),
    "saved_both": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "saved_tied_embedding": (
        "llama_tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
}
# Kinds that between them take every way through the tables of the Triton kernels.
BY_TABLES = ("both_biases", "dora_biased", "dora_fused", "dora_vocabulary", "saved_both")


def make(kind: str, bases: Path, folder: Path) -> torch.Tensor:
    """Save a random adapter of `kind` with PEFT; PEFT's logits [prompt, vocab]."""
    base, fields = KINDS[kind]
    torch.manual_seed(sorted(KINDS).index(kind))
    model = AutoModelForCausalLM.from_pretrained(bases / base, dtype=torch.float32)
    config = LoraConfig(r=6, lora_alpha=12, task_type="CAUSAL_LM", **fields)
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    model.save_pretrained(folder)
    return logits


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [(kind, KernelSet.reference) for kind in sorted(KINDS)]
    + [(kind, KernelSet.triton) for kind in BY_TABLES],
)
def test_a_kind_gives_pefts_logits(
    kind: str, kernels: KernelSet, bases: Path, make_engine: Any, tmp_path: Path
) -> None:
    expected = make(kind, bases, tmp_path)
    ops = KernelsConfig(ops=kernels)
    engine = make_engine(bases / KINDS[kind][0], kernels=ops, memory_bytes=128 << 20)
    engine.load_adapter(kind, tmp_path)
    before = prompt_logits(engine, PROMPT, None)
    found = prompt_logits(engine, PROMPT, kind)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(prompt_logits(engine, PROMPT, None), before)
    assert (found - before).abs().max() > 0.1, "the adapter changes something"


@pytest.mark.parametrize(("kernels", "max_tokens"), [("reference", 8), ("triton", 2)])
def test_all_kinds_in_one_batch_equal_one_by_one(
    kernels: str, max_tokens: int, bases: Path, make_engine: Any, tmp_path: Path
) -> None:
    engine = make_engine(
        bases / "llama",
        kernels=KernelsConfig(ops=KernelSet[kernels]),
        lora={"max_loras_per_batch": 8, "max_lora_rank": 8, "saved_modules": 3},
        memory_bytes=128 << 20,
    )
    kinds = sorted(kind for kind, (base, _) in KINDS.items() if base == "llama")
    for kind in kinds:
        make(kind, bases, tmp_path / kind)
        engine.load_adapter(kind, tmp_path / kind)
    wanted: list[Any] = [None, *kinds, None, {"dora": 0.5}, {"plain": 0.7, "saved_both": 0.4}]
    sampling = engine.sampling_params(max_tokens=max_tokens, ignore_eos=True)
    prompts = [PROMPT[: 2 + index % 4] for index in range(len(wanted))]
    alone = [engine.generate([p], sampling, [a])[0] for p, a in zip(prompts, wanted, strict=True)]
    together = engine.generate(prompts, sampling, wanted)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in together[: len(kinds) + 1]}) > len(kinds) // 2
