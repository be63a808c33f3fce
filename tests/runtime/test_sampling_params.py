"""Every field's range is checked, and the refusal names field, value and what is allowed."""

from typing import Any

import pytest

from engine.config import SamplingConfig
from engine.errors import RequestError
from engine.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", True),
        ("temperature", "hot"), ("top_k", -1), ("top_k", 1.5), ("top_p", 0.0), ("top_p", 1.1),
        ("min_p", -0.1), ("min_p", 2), ("max_tokens", 0), ("max_tokens", None), ("seed", -1),
        ("seed", 2**63), ("stop", ("",)), ("stop", ("x",) * 17), ("stop_token_ids", (-1,)),
        ("logprobs", -1), ("logprobs", 21), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_bad_values(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams.from_config(SamplingConfig(), **{field: value})


def test_config_gives_defaults_and_overrides_win() -> None:
    cfg = SamplingConfig(temperature=0.7, top_k=5, max_tokens=9)
    params = SamplingParams.from_config(cfg, max_tokens=3, stop="END", stop_token_ids=[1, 2])
    assert (params.temperature, params.top_k, params.max_tokens) == (0.7, 5, 3)
    assert (params.stop, params.stop_token_ids) == (("END",), (1, 2))
    assert not params.greedy and SamplingParams().greedy


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(RequestError, match=r"temprature: .*did you mean temperature"):
        SamplingParams.from_config(SamplingConfig(), temprature=1.0)
