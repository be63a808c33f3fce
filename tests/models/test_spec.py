"""ModelSpec from Hugging Face configs: what is read, and what is refused by name."""

from typing import Any

import pytest
import transformers as hf

from engine.errors import ModelError
from engine.models.spec import ModelSpec, RopeSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def test_old_and_new_rope_fields_mean_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = ModelSpec.from_config(LLAMA | {"rope_theta": 500000.0, "rope_scaling": scaling})
    new = ModelSpec.from_config(LLAMA | {"rope_parameters": scaling | {"rope_theta": 500000.0}})
    assert old == new
    assert old.rope == RopeSpec(500000.0, 16, "llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.LlamaConfig(), {"qkv_bias": False, "qk_norm": False, "sliding_window": None}),
        (hf.MistralConfig(), {"sliding_window": 4096, "num_kv_heads": 8}),
        (hf.Qwen2Config(), {"qkv_bias": True, "o_bias": False, "sliding_window": None}),
        (hf.Qwen3Config(), {"qk_norm": True, "head_dim": 128}),
        (hf.Phi3Config(), {"fused_projections": True, "qkv_bias": False}),
    ],
)
def test_families(config: hf.PreTrainedConfig, expected: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(config.to_dict())
    assert {key: getattr(spec, key) for key in expected} == expected


def test_end_tokens_of_both_files_count() -> None:
    spec = ModelSpec.from_config(LLAMA, {"eos_token_id": [7, 2]})
    assert spec.eos_token_ids == (7, 2)
    assert ModelSpec.from_config(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "qwen3_moe"},
            "model_type 'qwen3_moe' is not supported; supported are llama",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 lacks low_freq_factor"),
        ({"hidden_size": None}, "hidden_size is None, expected a whole number above 0"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 does not divide by num_key_value_heads 3",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
            "use_sliding_window",
        ),
    ],
)
def test_refusals_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_config(LLAMA | change)
