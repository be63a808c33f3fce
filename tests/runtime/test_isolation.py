"""A faulty adapter's rows disturb nobody: all others are bit-equal to the same batch with a base
row in its place.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import random_adapter

from engine.serving.engine import Engine

LLAMA = {
    f"model.layers.{layer}.{name}": widths
    for layer in range(2)
    for name, widths in {
        "self_attn.q_proj": (64, 64),
        "self_attn.v_proj": (64, 32),
        "mlp.down_proj": (128, 64),
    }.items()
}
NUM_STEPS = 6


def logits_of_all(engine: Engine, adapters: list[Any]) -> list[dict[int, torch.Tensor]]:
    """Logits by place in `adapters` of each step; every request is fed the same tokens."""
    places = {}
    for place, adapter in enumerate(adapters):
        prompt = list(range(5 + place, 9 + 2 * place))
        sampling = engine.sampling_params(max_tokens=NUM_STEPS + 1, ignore_eos=True)
        places[engine.add_request(prompt, sampling, adapter)] = place
    found = []
    for step in range(NUM_STEPS):
        rows = engine.scheduler.schedule()
        output = engine.runner.run(rows)
        sampling_rows = [row for row in rows if row.samples]
        found.append(
            {
                places[row.request.request_id]: logits.clone()
                for row, logits in zip(sampling_rows, output.logits, strict=True)
            }
        )
        for row, is_finite in zip(rows, output.finite, strict=True):
            assert is_finite == (adapters[places[row.request.request_id]] != "faulty")
            engine.scheduler.advance(row, 7 + step if row.samples else None)
    for request_id in places:
        engine.abort(request_id)
    return found


@pytest.mark.parametrize("place", [0, 3, 6])
def test_rows_beside_a_faulty_adapter_are_bit_equal(
    place: int, bases: Path, make_engine: Any
) -> None:
    engine = make_engine(
        bases / "llama",
        lora={"max_loras_per_batch": 6, "max_lora_rank": 16},
        memory={"prefix_cache": False},
        scheduler={"max_step_tokens": 128},
    )
    for name, rank in {"a": 8, "b": 8, "faulty": 8, "c": 8, "d": 16}.items():
        size = 1e30 if name == "faulty" else 0.3
        engine.load_adapter_from_tensors(name, *random_adapter(LLAMA, rank, rank, scale=size))
    others = ["a", None, "b", "c", "d", "a"]
    faulty, base = (
        logits_of_all(engine, [*others[:place], mine, *others[place:]]) for mine in ("faulty", None)
    )
    for step in range(NUM_STEPS):
        assert faulty[step].keys() == base[step].keys()
        assert not faulty[step][place].isfinite().all()
        for other in faulty[step].keys() - {place}:
            assert torch.equal(faulty[step][other], base[step][other]), (step, other)
