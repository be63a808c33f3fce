"""Adapters against PEFT: the shipped cases, mixed batches against one by one, and base rows left
alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import AdapterError

DATA = Path(__file__).parent.parent / "data" / "cases"
CASES = {
    path.name: json.loads((path / "expected.json").read_text()) for path in sorted(DATA.iterdir())
}
LOADABLE = sorted(name for name, case in CASES.items() if case["expect"] != "refuse")


def engine_for(base: str, bases: Path, make_engine: Any, max_rank: int = 64) -> Any:
    lora = {"max_loras_per_batch": 8, "max_lora_rank": max_rank}
    return make_engine(bases / base, lora=lora, memory_bytes=256 << 20)


@pytest.mark.parametrize("name", sorted(CASES))
def test_case_is_right_or_refused(name: str, bases: Path, make_engine: Any) -> None:
    """Greedy ids equal PEFT's and prompt logprobs are close, or one error names the cause and
    serving goes on.
    """
    case = CASES[name]
    engine = engine_for(case["base"], bases, make_engine, max_rank=512)
    sampling = engine.sampling_params(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
    try:
        engine.load_adapter("case", DATA / name / "adapter")
    except AdapterError as refused:
        assert case["expect"] != "load", f"{name}: must load, was refused: {refused}"
        for word in case.get("error", {}).get("mentions", []):
            assert word.lower() in str(refused).lower()
        served = engine.generate(case["prompts"], sampling)
        assert [list(c.token_ids) for c in served] == case["base_greedy_ids"]
        return
    assert case["expect"] != "refuse", f"{name}: must be refused, was loaded"
    served = engine.generate(case["prompts"], sampling, "case")
    assert [list(c.token_ids) for c in served] == case["greedy_ids"]
    logits = load_file(DATA / name / "logits.safetensors")
    for index, completion in enumerate(served):
        expected = logits[f"prompt{index}"][-1].float().log_softmax(-1)
        for token, value in completion.logprobs[0].top:
            assert abs(value - expected[token].item()) < 1e-3


def plain_cases(base: str) -> list[str]:
    """Cases on `base` that must load."""
    return [
        name for name in LOADABLE if CASES[name]["base"] == base and CASES[name]["expect"] == "load"
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_mixed_batch_equals_one_by_one(seed: int, bases: Path, make_engine: Any) -> None:
    """More adapters than slots, base rows among them, prompts in chunks: every row as if it were
    alone.
    """
    names = [name for name in plain_cases("llama") if name != "c18_rank_512"]
    engine = make_engine(
        bases / "llama",
        lora={"max_loras_per_batch": 3, "max_lora_rank": 32, "pool_rank_rows": 48},
        scheduler={"max_running_requests": 6, "max_step_tokens": 11},
        memory_bytes=256 << 20,
    )
    for name in names:
        engine.load_adapter(name, DATA / name / "adapter")
    generator = torch.Generator().manual_seed(seed)
    jobs = [(name, i) for name in [*names, None, None] for i in range(3)]
    jobs = [jobs[i] for i in torch.randperm(len(jobs), generator=generator).tolist()]
    sampling = engine.sampling_params(temperature=0.0, max_tokens=12, ignore_eos=True)
    some = CASES[names[0]]
    served = engine.generate(
        [some["prompts"][i] for _, i in jobs], sampling, [name for name, _ in jobs]
    )
    for completion, (name, i) in zip(served, jobs, strict=True):
        expected = CASES[name]["greedy_ids"][i] if name else some["base_greedy_ids"][i]
        assert list(completion.token_ids) == expected, (name, i)
    engine.scheduler.check_integrity()
    assert engine.scheduler.prefix_cache.num_available == engine.scheduler.pages.num_pages


def test_a_small_adapter_in_the_rows_of_a_large_one_sees_none_of_it(
    bases: Path, make_engine: Any
) -> None:
    large, small = CASES["p02_slot_big_rank"], CASES["p03_slot_small_rank"]
    engine = make_engine(
        bases / "llama",
        lora={"max_loras_per_batch": 1, "max_lora_rank": 32},
        memory_bytes=256 << 20,
    )
    engine.load_adapter("large", DATA / large["case"] / "adapter")
    engine.load_adapter("small", DATA / small["case"] / "adapter")
    sampling = engine.sampling_params(temperature=0.0, max_tokens=12, ignore_eos=True)
    for case, name in ((large, "large"), (small, "small"), (large, "large"), (small, "small")):
        served = engine.generate(case["prompts"], sampling, name)
        assert [list(c.token_ids) for c in served] == case["greedy_ids"]
