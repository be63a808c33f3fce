"""Grammars as masks: what they allow is what their text says, at every width of the logits; what is
wrong is refused and nothing breaks.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from engine.config import ModelConfig
from engine.errors import RequestError
from engine.text.grammar import GrammarMatcher, Grammars
from engine.text.tokenizer import Tokenizer, TokenizerData
from engine.weights.checkpoint import open_checkpoint

ENDS = frozenset({2, 60})
NONE: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def tokenizer(bases: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(ModelConfig(path=str(bases / "llama"))))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, ENDS, 512)


def allowed(matcher: GrammarMatcher, held_back: frozenset[int] = NONE) -> set[int]:
    bits = matcher.allowed(held_back).numpy().view(np.uint8)
    return set(np.unpackbits(bits, bitorder="little").nonzero()[0].tolist())


def feed(matcher: GrammarMatcher, ids: list[int]) -> GrammarMatcher:
    for token_id in ids:
        matcher.accept(token_id)
    return matcher


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="abc1", max_size=6))
def test_a_regex_allows_exactly_the_tokens_that_can_be_completed(
    tokenizer: Tokenizer, grammars: Grammars, text: str
) -> None:
    pattern = re.compile(r"[ab]*c?1{0,2}")
    matcher, done = grammars.matcher("regex", pattern.pattern), ""
    for token_id in tokenizer.encode(text):
        # Every beginning of a match is a match here, so that fullmatch decides on beginnings.
        possible = {
            other
            for other in range(4, 348)
            if other not in ENDS and pattern.fullmatch(done + tokenizer.decode([other]))
        }
        assert allowed(matcher) == possible | (NONE if matcher.error else ENDS)
        if token_id not in possible:
            return
        matcher.accept(token_id)
        done += tokenizer.decode([token_id])
    assert not matcher.error


def test_end_tokens_come_only_when_the_text_is_complete(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    matcher = grammars.matcher("grammar", 'start: "a" "b"?')
    assert allowed(matcher) & ENDS == NONE and not matcher.ended
    feed(matcher, [a])
    assert allowed(matcher) == {b, *ENDS} and not matcher.ended
    assert allowed(matcher, ENDS) == {b}
    assert allowed(matcher, ENDS | {b, 10**6 % 512}) == {b, *ENDS}, "all of it is as good as none"
    feed(matcher, [b])
    assert matcher.ended and not matcher.error
    other = feed(grammars.matcher("grammar", 'start: "a" "b"?'), [a, 60])
    assert other.ended and not other.error, "any of the end tokens will do"
    lost = feed(grammars.matcher("grammar", 'start: "a" "b"?'), [b])
    assert lost.error and not lost.ended


@pytest.mark.parametrize("schema", ["{}", "true", '{"type": "object"}'])
def test_json_is_compact_and_an_empty_schema_is_any_object(
    tokenizer: Tokenizer, grammars: Grammars, schema: str
) -> None:
    def ends_with(value: object, separators: tuple[str, str]) -> bool:
        matcher = grammars.matcher("json_schema", schema)
        text = json.dumps(value, separators=separators, ensure_ascii=False)
        for token_id in tokenizer.encode(text):
            if token_id not in allowed(matcher):
                return False
            matcher.accept(token_id)
        return matcher.ended

    for value in ({}, {"k": [1, {"größe": None}], "b c": "d e"}):
        assert ends_with(value, (",", ":"))
    assert not ends_with({"k": 1}, (", ", ": "))
    assert not ends_with({"k": 1}, (",", ": "))
    assert not ends_with([1], (",", ":"))


@pytest.mark.parametrize("width", [300, 348, 512, 1000])
def test_logits_may_be_narrower_or_wider_than_the_vocabulary(
    tokenizer: Tokenizer, width: int
) -> None:
    matcher = Grammars(tokenizer, ENDS, width).matcher("json_schema", "{}")
    assert len(matcher.allowed()) * 32 >= max(width, tokenizer.id_bound)
    feed(matcher, tokenizer.encode('{"'))
    assert max(allowed(matcher)) < 348, "special and unknown ids are no text"


def test_bytes_as_fallback() -> None:
    tokens = ["<unk>", "</s>", "\u2581", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    own = Library(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    own.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(TokenizerData(own.to_str()))
    matcher = Grammars(tokenizer, {1}, 260).matcher("regex", " (aé|b)")
    assert allowed(matcher) == {2}
    feed(matcher, [2])
    assert allowed(matcher) == {3, 4 + ord("a"), 4 + ord("b")}
    feed(matcher, [3])
    for byte in "é".encode():
        assert allowed(matcher) == {4 + byte}
        feed(matcher, [4 + byte])
    assert matcher.ended


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"type": "objec"}', "json_schema: Invalid type: objec"),
        ("json_schema", '{"$ref": "#/nope"}', "Pointer '/nope' does not exist"),
        ("json_schema", '{"unevaluatedItems": false}', "Unimplemented keys"),
        ("json_schema", '{"minLength": 3, "maxLength": 2, "type": "string"}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "#"}', "json_schema: no text matches it"),
        ("json_schema", "{", "json_schema: Expecting property name"),
        ("json_schema", "[]", r"got '\[\]', allowed is a JSON object or true"),
        ("json_schema", "[" * 100_000, "json_schema: "),
        ("json_schema", '{"items":' * 9000 + "{}" + "}" * 9000, "recursion"),
        ("regex", "(", "regex: .*unclosed group"),
        ("regex", r"(?=a)b", "look-around"),
        ("regex", "(" * 60_000 + "a" + ")" * 60_000, "regex: "),
        ("regex", "\ud83d", "regex: .*surrogates not allowed"),
        ("grammar", 'start: "a" b', 'unknown name: "b"'),
        ("grammar", 'x: "a"', "no start rule found"),
        ("grammar", "start: " + "(" * 60_000, "too deeply nested"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_reason(
    grammars: Grammars, kind: str, text: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        grammars.matcher(kind, text)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    assert not grammars.matcher("regex", "a").error


def test_long_chains_of_rules_do_not_overflow_the_stack(grammars: Grammars) -> None:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(9000))
    assert not grammars.matcher("grammar", f'start: r0\n{rules}\nr9000: "a"').error
    parts = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
    chain = {"$ref": "#/$defs/d0", "$defs": parts | {"d4000": {"type": "string"}}}
    assert not grammars.matcher("json_schema", json.dumps(chain)).error


def test_a_grammar_is_compiled_once_and_answers_do_not_share_their_place(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = grammars.matcher("regex", "ab+")
    monkeypatch.setattr(grammars, "_compile_now", lambda kind, text: pytest.fail("again"))
    second = grammars.matcher("regex", "ab+")
    feed(first, tokenizer.encode("a"))
    assert allowed(first) != allowed(second)


@pytest.mark.parametrize(
    ("data", "ends", "message"),
    [
        (None, ENDS, r"regex: this model has no tokenizer\.json, which grammars need"),
        (Library(models.BPE({"a": 0, "b": 1}, [])), {0}, "tokenizer cannot be used with grammars"),
        (Library(models.BPE({"a": 0, "b": 1}, [])), (), "names no end token, which grammars need"),
    ],
)  # fmt: skip
def test_models_that_cannot_do_it_say_so(
    data: Library | None, ends: set[int], message: str
) -> None:
    own = Tokenizer(TokenizerData() if data is None else TokenizerData(data.to_str()))
    with pytest.raises(RequestError, match=message):
        Grammars(own, ends, 2).matcher("regex", "a")
