"""The tokenizer against transformers' on nasty strings, and models that have none."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.config import ModelConfig
from engine.errors import ModelError, RequestError
from engine.text.tokenizer import Tokenizer, TokenizerData
from engine.weights.checkpoint import open_checkpoint
from engine.weights.default_model import default_model_directory

NASTY = [
    "", " ", "   ", "\n\n\t x", "12345 67.8", "don't we'll I'D", "  leading", "trailing  ",
    "\u4e2d\u6587\u5b57", "\u00e9\u0301 caf\u00e9", "\U0001f600\U0001f468\u200d\U0001f469",
    "<|im_start|>user\nhi<|im_end|>", "</s><s>", "a\u0000b", "\u200b zero", "def f(x):\n    "
    "return x",
]  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "default"])
def directory(request: pytest.FixtureRequest, bases: Path) -> Path:
    return default_model_directory(None) if request.param == "default" else bases / request.param


def test_ids_and_text_equal_transformers(directory: Path) -> None:
    own = Tokenizer.from_checkpoint(open_checkpoint(ModelConfig(path=str(directory))))
    other = AutoTokenizer.from_pretrained(directory)
    for text in NASTY:
        ids = own.encode(text)
        assert ids == other(text, add_special_tokens=False).input_ids, text
        expected = other.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert own.decode(ids) == expected, text
    assert own.eos_token_ids == {other.eos_token_id}
    assert own.bos_token_id == other.bos_token_id


def test_token_bytes_join_to_the_text(bases: Path) -> None:
    own = Tokenizer.from_checkpoint(open_checkpoint(ModelConfig(path=str(bases / "llama"))))
    for text in NASTY:
        if "<" not in text:
            joined = b"".join(own.token_bytes(i) for i in own.encode(text))
            assert joined == text.encode()
    assert own.token_bytes(10**6) == b""


def test_a_model_without_tokenizer_serves_ids_only() -> None:
    none = Tokenizer(TokenizerData())
    assert not none.available and none.eos_token_ids == frozenset()
    with pytest.raises(RequestError, match=r"no tokenizer\.json; give prompts as token ids"):
        none.encode("hi")


def test_a_broken_tokenizer_is_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(TokenizerData("{}"))


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives(bases: Path, text: str) -> None:
    own = Tokenizer.from_checkpoint(open_checkpoint(ModelConfig(path=str(bases / "llama"))))
    assert own.decode(own.encode(text), skip_special_tokens=False) == text


def test_half_a_surrogate_pair_is_refused_and_named(bases: Path) -> None:
    own = Tokenizer.from_checkpoint(open_checkpoint(ModelConfig(path=str(bases / "llama"))))
    with pytest.raises(RequestError, match=r"the text has '\\ud83d' at character 3, half of a"):
        own.encode("hi \ud83d!")


def test_spellings_are_with_and_without_a_blank_and_ids_have_a_bound(directory: Path) -> None:
    own = Tokenizer.from_checkpoint(open_checkpoint(ModelConfig(path=str(directory))))
    plain, spaced = own.spellings("hello")
    assert own.decode(plain) == "hello" and own.decode(spaced) == " hello"
    assert own.decode([own.id_bound - 1], skip_special_tokens=False)
    assert not own.decode([own.id_bound], skip_special_tokens=False)
