"""The whole engine on Triton kernels, in Triton's interpreter: PEFT's tokens, base and adapters in
one batch, prompts in chunks.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import KernelsConfig, KernelSet
from engine.errors import ConfigError
from engine.serving.engine import Engine

CASES = Path(__file__).parent.parent / "data" / "cases"
TRITON = KernelsConfig(ops=KernelSet.triton, attention=KernelSet.triton)
NAMES = ("c00_control_all7", "c08_dora")


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
