"""Adapter files that are wrong in some way: never a crash, a hang or a silent acceptance.

`scripts/fuzz_adapters.py mutate` runs many more.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from verdicts import judge, mutate, sources

CASES = Path(__file__).parents[2] / "data" / "cases"
BASE_OF = {
    path.name: json.loads((path / "expected.json").read_text())["base"] for path in CASES.iterdir()
}
NUM_FILES = 1200


def test_mutated_files_are_refused_or_loaded_right(
    bases: Path, make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lora = {"max_lora_rank": 512}
    of_base = {
        name: make_engine(bases / name, lora=lora, memory_bytes=128 << 20).lora_manager._base
        for name in ("llama", "qwen2_bias", "phi3_fused")
    }
    found = sources(CASES, of_base, BASE_OF)
    outcomes: Counter[str] = Counter()
    for seed in range(NUM_FILES):
        source = found[seed % len(found)]
        kind = mutate(source, tmp_path / "mutated", seed)
        outcome, word = judge(tmp_path / "mutated", of_base[BASE_OF[source.parent.name]])
        assert outcome in ("refused", "right"), f"seed {seed}, {kind} of {source}: {word}"
        outcomes[outcome] += 1
    assert outcomes["refused"] > NUM_FILES / 2 and outcomes["right"] > NUM_FILES / 20
