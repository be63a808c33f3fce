"""Adapter files that are wrong in some way: never a crash, a hang or a silent acceptance.

`scripts/fuzz_adapters.py mutate` runs many more.
"""

from collections import Counter
from pathlib import Path

import pytest
from made_adapters import make_sound
from verdicts import bases_in_engines, judge, mutate, sources

NUM_FILES = 500
NUM_MADE = 8


@pytest.mark.filterwarnings("ignore")
def test_mutated_files_are_refused_or_loaded_right(
    bases: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_sound(NUM_MADE, bases, tmp_path / "made")
    known = bases_in_engines(bases)
    found = sources(cases, tmp_path / "made", known)
    outcomes: Counter[str] = Counter()
    for seed in range(NUM_FILES):
        source = found[seed % len(found)]
        kind = mutate(source, tmp_path / "mutated", seed)
        outcome, word = judge(tmp_path / "mutated", known[source.base])
        assert outcome in ("refused", "right"), f"{seed}, {kind} of {source}, {outcome}: {word}"
        outcomes[outcome] += 1
    assert outcomes["refused"] > NUM_FILES / 2 and outcomes["right"] > NUM_FILES / 20
