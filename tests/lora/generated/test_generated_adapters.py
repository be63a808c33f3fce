"""Adapters of random settings: PEFT's logits, or a refusal that names the cause.

`scripts/fuzz_adapters.py generate` makes more and prints counts by feature.
"""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from made_adapters import Impossible, run_one

OUTCOMES: Counter[str] = Counter()


@settings(
    max_examples=72,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 1 << 31))
@pytest.mark.filterwarnings("ignore")
def test_generated_adapters_load_right_or_are_refused(seed: int, bases: Path) -> None:
    try:
        recipe, outcome, fault = run_one(seed, bases)
    except Impossible:
        assume(False)
    assert not fault, f"seed {seed}: {fault}; {recipe}"
    OUTCOMES[outcome] += 1


def test_enough_were_loaded_and_refused() -> None:
    """After the test above: both outcomes were there."""
    if not OUTCOMES:
        pytest.skip("runs after the generated adapters")
    assert sum(OUTCOMES.values()) >= 60
    assert OUTCOMES["loaded"] >= 30 and OUTCOMES["refused"] >= 5, dict(OUTCOMES)
