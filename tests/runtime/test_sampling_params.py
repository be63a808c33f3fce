"""Every field's range is checked, and the refusal names field, value and what is allowed."""

import dataclasses
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
        ("logprobs", -1), ("logprobs", 21), ("ignore_eos", 1), ("prompt_logprobs", 21),
        ("repetition_penalty", 0.0), ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", "1"),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {"5": 1.0}), ("logit_bias", {5: 100.5}),
        ("logit_bias", {True: 1.0}), ("logit_bias", {5: float("nan")}), ("logit_bias", 5),
        ("logit_bias", ((5, 1.0), (5, 2.0))), ("logit_bias", (5,)),
        ("bad_words", ("",)), ("bad_words", (5,)), ("bad_words", ("x",) * 129),
        ("min_tokens", -1), ("min_tokens", 65), ("n", 0), ("n", 129), ("n", True),
        ("include_stop_str_in_output", None), ("json_schema", ""), ("json_schema", 5),
        ("json_schema", {"a": {1, 2}}), ("regex", ""), ("regex", "a" * 65537), ("grammar", b"a"),
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


def test_friendly_forms_become_immutable_ones() -> None:
    params = SamplingParams.from_config(
        SamplingConfig(min_tokens=2, presence_penalty=0.5, repetition_penalty=1.1),
        logit_bias={7: -100, 3: 0.5},
        bad_words="no",
        json_schema={"type": "object"},
    )
    assert params.logit_bias == ((7, -100), (3, 0.5)) and params.bad_words == ("no",)
    assert params.structure == ("json_schema", '{"type": "object"}')
    assert (params.min_tokens, params.presence_penalty, params.repetition_penalty) == (2, 0.5, 1.1)
    assert hash(params) == hash(dataclasses.replace(params))
    any_object = SamplingParams.from_config(SamplingConfig(), json_schema=True)
    assert any_object.structure == ("json_schema", "true")
    assert SamplingParams(regex="a+").structure == ("regex", "a+")
    assert SamplingParams().structure is None


def test_one_grammar_at_most() -> None:
    with pytest.raises(RequestError, match="json_schema and regex are given together; an answer"):
        SamplingParams(json_schema="{}", regex="a")
