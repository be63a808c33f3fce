"""Text to token ids and back, over the `tokenizers` library. Where its data comes from, it is not
told.

A model without tokenizer data still serves token ids; asking for text then raises RequestError.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import tokenizers

from engine.errors import ModelError, RequestError
from engine.text.chat import ChatTemplate


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A tokenizer.json as text ("" if there is none) and what tokenizer_config.json holds."""

    tokenizer_json: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


class TokenizerSource(Protocol):
    """Who has tokenizer data: a checkpoint."""

    def tokenizer_data(self) -> TokenizerData: ...


class Tokenizer:
    """`encode` and `decode` without hidden additions: no special tokens unless the text spells
    them.
    """

    def __init__(self, data: TokenizerData) -> None:
        """Raises ModelError if the data is no tokenizer."""
        self._config = data.config
        self._own: tokenizers.Tokenizer | None = None
        if data.tokenizer_json:
            try:
                self._own = tokenizers.Tokenizer.from_str(data.tokenizer_json)
            except Exception as error:  # the library raises bare Exception
                raise ModelError(f"tokenizer.json cannot be read: {error}") from error
            self._own.no_padding()
            self._own.no_truncation()
        self.chat_template = ChatTemplate.from_config(data.config)

    @classmethod
    def from_checkpoint(cls, checkpoint: TokenizerSource) -> "Tokenizer":
        """The tokenizer that belongs to a checkpoint."""
        return cls(checkpoint.tokenizer_data())

    @property
    def available(self) -> bool:
        """Whether there is tokenizer data; without it only token ids are served."""
        return self._own is not None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._required.get_vocab_size(with_added_tokens=True)

    @cached_property
    def id_bound(self) -> int:
        """One more than the largest id; ids may leave gaps."""
        return max(self._required.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids of the configured end token; empty if there is none."""
        found = self._special_id("eos_token")
        return frozenset() if found is None else frozenset((found,))

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids; `add_special_tokens` adds what the tokenizer adds to plain prompts. Raises
        RequestError if the text is no Unicode.
        """
        own = self._required
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has {text[error.start]!r} at character {error.start}, half of a "
                "surrogate pair, which no tokenizer reads; leave it out"
            ) from error
        return list(own.encode(text, add_special_tokens=add_special_tokens).ids)

    def spellings(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of a text as it stands and after a blank, as words come inside a line; each
        once, none of them empty.
        """
        found = (tuple(self.encode(spelled)) for spelled in (text, " " + text))
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 come as U+FFFD."""
        return str(self._required.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for, best effort for vocabularies that are not byte-level."""
        token = self._required.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return token.replace("\u2581", " ").encode()

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return str(self._required.to_str())

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a conversation, up to the assistant's answer. Raises RequestError."""
        special = {key: self._special(key) for key in ("bos_token", "eos_token")}
        return self.chat_template.render(messages, **({**special, **variables}))

    @property
    def _required(self) -> tokenizers.Tokenizer:
        if self._own is None:
            raise RequestError(
                "this model has no tokenizer.json; give prompts as token ids, or put the file into "
                "the model's directory"
            )
        return self._own

    def _special(self, key: str) -> str:
        value = self._config.get(key)
        return str(value["content"] if isinstance(value, Mapping) else value or "")

    def _special_id(self, key: str) -> int | None:
        token = self._special(key)
        if self._own is None or not token:
            return None
        found: int | None = self._own.token_to_id(token)
        return found


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2) and back."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    alphabet = {chr(byte): byte for byte in kept}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
