"""The default model and the demo adapters against transformers and PEFT: the same greedy tokens."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine import wiring
from engine.config import EngineConfig, LoRAConfig
from engine.serving.engine import Engine
from engine.weights.default_model import default_model_directory

DEMO = Path(__file__).parents[2] / "engine" / "lora" / "demo"
NAMES = ("pirate", "json", "shout")
QUESTIONS = ("What is the capital of France?", "How do I make tea?")
NEW = 16
NEAR_TIE = 0.05  # of the two best logits: beyond it, both are right


@pytest.fixture(scope="module")
def engine() -> Any:
    adapters = {name: f"demo:{name}" for name in NAMES}
    container = wiring.build(EngineConfig(lora=LoRAConfig(adapters=adapters)))
    yield container.engine()
    container.reset_singletons()


@pytest.fixture(scope="module")
def oracle() -> Any:
    """Greedy ids and the steps before the first near-tie, by adapter and prompt ids."""
    base = AutoModelForCausalLM.from_pretrained(default_model_directory(None), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, DEMO / NAMES[0], adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.load_adapter(DEMO / name, adapter_name=name)

    def run(adapter: str | None, prompt: list[int]) -> tuple[list[int], int, torch.Tensor]:
        if adapter is not None:
            model.set_adapter(adapter)
        own = model if adapter is not None else model.get_base_model()
        with torch.inference_mode(), model.disable_adapter() if adapter is None else nullcontext():
            ids = own.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=2
            )[0]
            logits = own(ids[None]).logits[0, len(prompt) - 1 : -1].float()
        best = logits.topk(2).values
        close = ((best[:, 0] - best[:, 1]) < NEAR_TIE).nonzero()
        return ids[len(prompt) :].tolist(), int(close[0]) if len(close) else NEW, logits

    return run


def test_base_and_demo_adapters_mixed_equal_peft(engine: Engine, oracle: Any) -> None:
    jobs = [(name, question) for question in QUESTIONS for name in (None, *NAMES)]
    prompts = [
        engine.tokenizer.encode(engine.tokenizer.render_chat([{"role": "user", "content": q}]))
        for _, q in jobs
    ]
    sampling = engine.sampling_params(temperature=0.0, max_tokens=NEW, logprobs=5)
    served = engine.generate(prompts, sampling, [name for name, _ in jobs])
    compared = 0
    for (name, _), prompt, completion in zip(jobs, prompts, served, strict=True):
        ids, certain, logits = oracle(name, prompt)
        steps = min(certain, len(ids))
        assert list(completion.token_ids[:steps]) == ids[:steps], name
        for step in range(steps):
            logprobs = logits[step].log_softmax(-1)
            for token, value in completion.logprobs[step].top:
                assert abs(value - logprobs[token].item()) < 2e-3
        compared += steps
    assert compared > 60, "too few steps before near-ties to mean anything"
    assert len({completion.text for completion in served}) == len(jobs)


def test_a_second_start_opens_the_cache_at_once() -> None:
    started = time.perf_counter()
    default_model_directory(None)
    assert time.perf_counter() - started < 0.1
