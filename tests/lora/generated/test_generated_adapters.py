"""Adapters of random settings: PEFT's logits, or a refusal that names the cause.

`scripts/fuzz_adapters.py generate` makes more and prints counts by feature.
"""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from made_adapters import Impossible, run_one


@pytest.mark.filterwarnings("ignore")
def test_generated_adapters_load_right_or_are_refused(bases: Path) -> None:
    """Both outcomes are there, too."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=72,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(seed=st.integers(0, 1 << 31))
    def load(seed: int) -> None:
        try:
            recipe, outcome, fault = run_one(seed, bases)
        except Impossible:
            assume(False)
        assert not fault, f"seed {seed}: {fault}; {recipe}"
        outcomes[outcome] += 1

    load()
    assert sum(outcomes.values()) >= 60
    assert outcomes["loaded"] >= 30 and outcomes["refused"] >= 5, dict(outcomes)
