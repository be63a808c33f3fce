"""Plain torch, Triton and decode graphs on a CUDA device: cases equal PEFT's tokens, the audit
explains every byte.

Needs a CUDA device: `scripts/test gpu`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import (
    DeviceConfig,
    DeviceKind,
    EngineConfig,
    GraphConfig,
    GraphMode,
    KernelsConfig,
    KernelSet,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
)
from engine.serving.engine import Engine

pytestmark = pytest.mark.gpu
BASES = ("llama", "llama_tied", "qwen2_bias", "phi3_fused")
KINDS = (
    (KernelSet.reference, GraphConfig()),
    (KernelSet.triton, GraphConfig()),
    (KernelSet.triton, GraphConfig(GraphMode.decode, [1, 2, 4, 8])),
)
CASES = Path(__file__).parent.parent / "data" / "cases"


@pytest.fixture
def engine(request: pytest.FixtureRequest, bases: Path) -> Any:
    from engine import wiring

    config = EngineConfig(
        model=ModelConfig(path=str(bases / request.param[0])),
        kernels=KernelsConfig(request.param[1], request.param[1]),
        graph=request.param[2],
        device=DeviceConfig(kind=DeviceKind.cuda),
        memory=MemoryConfig(fraction=0.3, max_kv_tokens=20000),
        lora=LoRAConfig(max_lora_rank=512, saved_modules=2),
    )
    container = wiring.build(config)
    yield container.engine()
    container.reset_singletons()


@pytest.mark.parametrize(
    "engine",
    [(base, *kind) for base in BASES for kind in KINDS],
    indirect=True,
)
def test_cases_and_audit(engine: Engine) -> None:
    sampling = engine.sampling_params(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert engine.audit.unexplained_bytes is not None
    assert abs(engine.audit.unexplained_bytes) < 4 << 20
    for path in sorted(CASES.iterdir()):
        case = json.loads((path / "expected.json").read_text())
        if case["base"] != engine.model.name or case["expect"] == "refuse":
            continue
        engine.load_adapter("case", path / "adapter")
        prompts = case["prompts"] * 2
        served = engine.generate(prompts, sampling, ["case"] * 3 + [None] * 3)
        expected = case["greedy_ids"] + case["base_greedy_ids"]
        assert [list(c.token_ids) for c in served] == expected, case["case"]
        engine.unload_adapter("case")
