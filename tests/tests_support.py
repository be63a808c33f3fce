"""Helpers that tests import by name."""

from typing import Any

import torch

NEAR_TIE = 1e-4


def near_tie(logprobs: torch.Tensor) -> int:
    """Steps of [N, vocab] before the first whose two best are closer than NEAR_TIE."""
    best = logprobs.topk(2, dim=-1).values
    close = ((best[:, 0] - best[:, 1]) < NEAR_TIE).nonzero()
    return int(close[0]) if len(close) else logprobs.shape[0]


def random_adapter(
    modules: dict[str, tuple[int, int]], rank: int, seed: int, scale: float = 0.3
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """PEFT tensors and config of a random adapter on `modules` (name -> (in, out))."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (width_in, width_out) in modules.items():
        a = torch.randn(rank, width_in, generator=generator) * scale
        b = torch.randn(width_out, rank, generator=generator) * scale
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    targets = sorted({name.rsplit(".", 1)[1] for name in modules})
    return tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}


def prompt_logits(engine: Any, prompt: list[int], adapter: Any) -> torch.Tensor:
    """Logits [prompt, vocab] after each token of a prompt, a prefill of its own for each."""
    found = []
    for length in range(1, len(prompt) + 1):
        request_id = engine.add_request(
            prompt[:length], engine.sampling_params(max_tokens=1, ignore_eos=True), adapter
        )
        rows = engine.scheduler.schedule()
        found.append(engine.runner.run(rows).logits[0].clone())
        engine.abort(request_id)
    return torch.stack(found)
