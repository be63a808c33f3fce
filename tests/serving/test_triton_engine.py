"""The whole engine on Triton kernels, in Triton's interpreter: PEFT's tokens, base and adapters in
one batch, prompts in chunks.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from engine.config import KernelsConfig, KernelSet
from engine.errors import ConfigError
from engine.serving.engine import Engine

CASES = Path(__file__).parent.parent / "data" / "cases"
TRITON = KernelsConfig(ops=KernelSet.triton, attention=KernelSet.triton)
NAMES = ("c00_control_all7", "c08_dora")
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it on the card")
def test_tokens_are_those_of_peft(bases: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(
        bases / "llama", kernels=TRITON, scheduler={"max_step_tokens": 17}, memory_bytes=256 << 20
    )
    cases = [json.loads((CASES / name / "expected.json").read_text()) for name in NAMES]
    for name in NAMES:
        engine.load_adapter(name, CASES / name / "adapter")
    sampling = engine.sampling_params(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = cases[0]["prompts"][:2]
    served = engine.generate(prompts * 3, sampling, [None] * 2 + [n for n in NAMES for _ in "ab"])
    expected = [cases[0]["base_greedy_ids"][:2], *(case["greedy_ids"][:2] for case in cases)]
    assert [list(c.token_ids) for c in served] == [ids[:6] for two in expected for ids in two]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels on the card")
@pytest.mark.parametrize(
    "config",
    [hf.Qwen3Config(**SMALL), hf.MistralConfig(**SMALL, sliding_window=5)],
    ids=["qk_norm", "window"],
)
def test_architectures(
    config: hf.PreTrainedConfig, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(tmp_path)
    prompt = [5, 9, 300, 17, 44, 8, 120, 33, 250]
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
    engine = make_engine(
        tmp_path,
        kernels=TRITON,
        scheduler={"max_step_tokens": 7, "max_running_requests": 2},
        memory_bytes=128 << 20,
    )
    sampling = engine.sampling_params(temperature=0.0, max_tokens=4, ignore_eos=True)
    (served,) = engine.generate([prompt], sampling)
    assert list(served.token_ids) == whole[0, len(prompt) :].tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels on the card")
def test_large_pages_of_a_short_context(bases: Path, make_engine: Callable[..., Engine]) -> None:
    """A page table is never narrower than some pages: the workspace must hold its splits, too."""
    engine = make_engine(
        bases / "llama",
        kernels=TRITON,
        model={"max_model_len": 32},
        memory={"page_size": 64},
        scheduler={"max_running_requests": 1},
        memory_bytes=256 << 20,
    )
    case = json.loads((CASES / NAMES[0] / "expected.json").read_text())
    sampling = engine.sampling_params(temperature=0.0, max_tokens=4, ignore_eos=True)
    (served,) = engine.generate([case["prompts"][0]], sampling)
    assert list(served.token_ids) == case["base_greedy_ids"][0][:4]


@pytest.mark.parametrize("key", ["ops", "attention"])
def test_without_a_card_they_are_refused(
    key: str, bases: Path, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=f"kernels.{key}: got triton.*kernels=reference"):
        make_engine(bases / "llama", kernels=KernelsConfig(**{key: KernelSet.triton}))
