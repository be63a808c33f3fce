"""Deltas joined equal the decode of all ids, and no half character is ever shown."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from engine.config import ModelConfig
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer, TokenizerData
from engine.weights.checkpoint import open_checkpoint

KINDS = ["byte level", "byte level with gaps", "byte fallback"]


def byte_fallback() -> Tokenizer:
    """A sentencepiece-like vocabulary: pieces with a leading-space mark, bytes as fallback."""
    pieces = ["\u2581the", "\u2581cat", "s", "\u2581", "\u00e9"]
    tokens = ["<unk>", *pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    own = Library(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    own.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(TokenizerData(own.to_str()))


def byte_level_with_gaps() -> Tokenizer:
    """A byte-level vocabulary without tokens for bytes that no text has, as SmolLM2's."""
    absent = {0xC0, 0xC1, *range(0xF5, 0x100)}
    tokens = [byte for byte in pre_tokenizers.ByteLevel.alphabet() if ord(byte) not in absent]
    own = Library(models.BPE({token: i for i, token in enumerate(sorted(tokens))}, []))
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(["<s>"])
    return Tokenizer(TokenizerData(own.to_str()))


@pytest.fixture(scope="module")
def kinds(bases: Path) -> dict[str, Tokenizer]:
    byte_level = Tokenizer.from_checkpoint(open_checkpoint(ModelConfig(path=str(bases / "llama"))))
    return {
        "byte level": byte_level,
        "byte level with gaps": byte_level_with_gaps(),
        "byte fallback": byte_fallback(),
    }


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    own = IncrementalDetokenizer(tokenizer)
    return [*(own.push(token) for token in ids), own.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_whole(
    kinds: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = kinds[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_half_character_is_shown(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    text = "\u4e2d\U0001f600\u00e9x" * 20
    byte_ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [byte_ids[bytes([byte])] for byte in text.encode()]
    shown = deltas(tokenizer, ids)
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
