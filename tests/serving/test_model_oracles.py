"""Every architecture against transformers in fp32: greedy ids equal, logprobs within 1e-3, whole
and chunked.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests_support import near_tie

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, hf.PreTrainedConfig] = {
    "llama": hf.LlamaConfig(**SMALL),
    "llama_tied": hf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama31_rope": hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": hf.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama_biases_head_dim": hf.LlamaConfig(
        **SMALL, attention_bias=True, mlp_bias=True, head_dim=20
    ),
    "mistral_window": hf.MistralConfig(**SMALL, head_dim=24, sliding_window=9),
    "qwen2": hf.Qwen2Config(**SMALL),
    "qwen2_tied": hf.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    "phi3": hf.Phi3Config(**SMALL),
    "phi3_window": hf.Phi3Config(**SMALL, sliding_window=7),
}
PROMPTS = [[5, 9, 300, 17, 44, 8, 120, 33, 250, 61, 7, 19, 201], [3], [77, 12, 12, 90, 4]]
NEW = 14


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, hf.PreTrainedModel]:
    """A random model with weights large enough that attention matters, saved and in memory."""
    torch.manual_seed(1)
    config = ARCHITECTURES[request.param]
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


def oracle(model: hf.PreTrainedModel, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy ids and, for each of them, log-probabilities of the whole vocabulary."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    return ids[len(prompt) :], logits.log_softmax(-1)


@pytest.mark.parametrize("chunk", [4, 64])
def test_equals_transformers(
    reference: tuple[Path, hf.PreTrainedModel], chunk: int, make_engine: Any
) -> None:
    folder, model = reference
    engine = make_engine(folder, scheduler={"max_running_requests": 4, "max_step_tokens": chunk})
    sampling = engine.sampling_params(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=5)
    for completion, prompt in zip(engine.generate(PROMPTS, sampling), PROMPTS, strict=True):
        ids, logprobs = oracle(model, prompt)
        stop = near_tie(logprobs)
        assert list(completion.token_ids[:stop]) == ids[:stop]
        assert stop >= NEW // 2, "the oracle is too close to call; change the seed"
        for step in range(stop):
            own = completion.logprobs[step]
            assert abs(own.logprob - logprobs[step, ids[step]].item()) < 1e-3
            for token, value in own.top:
                assert abs(value - logprobs[step, token].item()) < 1e-3
