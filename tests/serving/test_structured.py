"""Structured output end to end: every answer matches what it was to match, whatever else is in the
batch and however often it is preempted.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from schema_support import load_adapters, run_schemas

from engine.errors import RequestError
from engine.runtime.request import FinishReason
from engine.serving.engine import Engine
from engine.text.grammar import Grammars

PROMPT = [1, 267, 334, 339]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,8}$"},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def engine(bases: Path, make_engine: Any) -> Engine:
    made: Engine = make_engine(bases / "llama")
    return made


@pytest.mark.parametrize(("base", "count"), [("llama", 40), ("phi3_fused", 12)])
def test_answers_match_their_schemas_beside_adapters(
    base: str, count: int, bases: Path, make_engine: Any
) -> None:
    assert run_schemas(count, make_engine(bases / base), seed=count) > count // 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regex_and_grammar(engine: Engine, temperature: float) -> None:
    pattern = r"(yes|no), [0-9]{2,4}(\.[0-9]{1,2})?"
    lark = 'start: (word ","){2,3} word\nword: /[a-c]{1,3}/ | "é"'
    same = {"temperature": temperature, "max_tokens": 40, "seed": 3}
    sampling = [
        engine.sampling_params(regex=pattern, **same),
        engine.sampling_params(grammar=lark, **same),
        engine.sampling_params(**same),
    ]
    by_regex, by_grammar, free = engine.generate([PROMPT] * 3, sampling)
    assert re.fullmatch(pattern, by_regex.text)
    assert re.fullmatch(r"(([a-c]{1,3}|é),){2,3}([a-c]{1,3}|é)", by_grammar.text)
    assert by_regex.finish_reason is by_grammar.finish_reason is FinishReason.stop
    alone = engine.generate([PROMPT], sampling[2])[0]
    assert (free.token_ids, free.text) == (alone.token_ids, alone.text)


def test_any_object_and_a_cut_one(engine: Engine) -> None:
    sampling = engine.sampling_params(json_schema=True, max_tokens=3, temperature=2.0, n=6, seed=1)
    for answer in engine.generate([PROMPT], sampling):
        assert answer.text.startswith("{")
        done = answer.finish_reason is FinishReason.stop
        assert done == (answer.text.endswith("}") and json.loads(answer.text) is not None)


def test_answers_end_where_the_grammar_does_and_not_before_min_tokens(engine: Engine) -> None:
    same = {"temperature": 0.0, "logprobs": 1, "max_tokens": 30}
    fixed = engine.generate([PROMPT], engine.sampling_params(regex="abc", min_tokens=25, **same))[0]
    assert (fixed.text, fixed.finish_reason) == ("abc", FinishReason.stop)
    assert len(fixed.token_ids) == len(fixed.logprobs) < 4, "no end token was needed"
    loose = {"regex": "a*", "logit_bias": {2: 100.0}, **same}
    assert engine.generate([PROMPT], engine.sampling_params(**loose))[0].text == ""
    for changes in ({"min_tokens": 9}, {"ignore_eos": True, "max_tokens": 9}):
        answer = engine.generate([PROMPT], engine.sampling_params(**(loose | changes)))[0]
        assert set(answer.text) == {"a"} and len(answer.text) >= 9
        assert len(answer.token_ids) in (9, 10)


def test_an_empty_text_is_an_answer_too(engine: Engine) -> None:
    sampling = engine.sampling_params(grammar='start: ""', min_tokens=3)
    answer = engine.generate([PROMPT], sampling)[0]
    assert (answer.text, answer.finish_reason) == ("", FinishReason.stop)


def test_any_end_token_of_the_model_ends_it(engine: Engine, monkeypatch: Any) -> None:
    ends = frozenset({2, 60})
    monkeypatch.setattr(engine, "_end_ids", ends)
    monkeypatch.setattr(engine, "grammars", Grammars(engine.tokenizer, ends, 512))
    for end in ends:
        sampling = engine.sampling_params(regex="(ab)*", logit_bias={end: 100.0})
        answer = engine.generate([PROMPT], sampling)[0]
        assert (answer.token_ids, answer.text) == ((end,), "")
        assert answer.finish_reason is FinishReason.stop


def test_samples_and_stop_strings(engine: Engine) -> None:
    sampling = engine.sampling_params(json_schema=SCHEMA, temperature=1.0, n=8, seed=5)
    answers = engine.generate([PROMPT], sampling)
    assert [answer.index for answer in answers] == list(range(8))
    assert len({answer.text for answer in answers}) > 4
    for answer in answers:
        assert set(json.loads(answer.text)) == {"name", "age", "tags"}
    sampling = engine.sampling_params(json_schema=SCHEMA, stop='"age"')
    stopped = engine.generate([PROMPT], sampling)[0]
    assert re.fullmatch(r'\{"name":"[a-z]{3,8}",', stopped.text)
    assert stopped.finish_reason is FinishReason.stop


def test_preempted_answers_go_on_where_they_were(bases: Path, make_engine: Any) -> None:
    found = []
    for changes in ({}, {"memory": {"max_kv_tokens": 144}}):
        engine = make_engine(bases / "llama", **changes)
        load_adapters(engine)
        sampling = engine.sampling_params(
            json_schema=SCHEMA, temperature=1.0, n=3, seed=5, max_tokens=60, frequency_penalty=0.2
        )
        answers = engine.generate([PROMPT] * 3, sampling, [None, "a", {"a": 0.5, "b": 1.0}])
        found.append([(answer.text, answer.finish_reason) for answer in answers])
        engine.scheduler.check_integrity()
    assert engine.scheduler.num_preemptions > 0
    assert found[0] == found[1]
    assert all(reason is FinishReason.stop for _, reason in found[0])


def test_bad_grammars_are_refused_and_serving_goes_on(engine: Engine) -> None:
    with pytest.raises(RequestError, match="json_schema: Unknown format: nothing"):
        bad = engine.sampling_params(json_schema={"type": "string", "format": "nothing"})
        engine.generate([PROMPT, PROMPT], [engine.sampling_params(), bad])
    assert not engine.has_work
    answer = engine.generate([PROMPT], engine.sampling_params(regex="[ab]{3}"))[0]
    assert re.fullmatch("[ab]{3}", answer.text)


def test_what_leaves_no_token_ends_its_request_alone(engine: Engine) -> None:
    hopeless = engine.sampling_params(regex="[ab]+", bad_words=["a", "b"])
    sampling = [engine.sampling_params(regex="[ab]{3}"), hopeless, engine.sampling_params()]
    good, bad, free = engine.generate([PROMPT] * 3, sampling)
    assert bad.finish_reason is FinishReason.error
    assert bad.error.startswith("no token is left to choose from: logit_bias, bad_words")
    assert re.fullmatch("[ab]{3}", good.text) and len(free.token_ids) == 64
    engine.scheduler.check_integrity()
