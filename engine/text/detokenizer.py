"""Text of a token stream, piece by piece: the pieces joined equal the tokenizer's `decode` of all
ids.

Asks the tokenizer for `decode` over a few of the newest tokens; knows no vocabulary format
beyond the two ways in which tokens carry bytes. A character whose bytes are not complete is held
back until they are.
"""

from functools import lru_cache

from engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A token carries a byte or more, and no UTF-8 character has more than 4 of them: what came before
# the newest 4 tokens has no part in how the next bytes are read.
_NUM_CONTEXT = 4
_MAX_WINDOW = 16


class IncrementalDetokenizer:
    """Decodes one stream. A push costs the same at any length; special tokens give no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._lone_byte = _lone_byte(tokenizer)
        self._window: list[int] = []
        self._num_settled = 0
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is certain with this token; empty while a character is incomplete."""
        if self._is_silent(token_id):
            return ""
        if self._lone_byte is None:
            return self._push_bytes(token_id)
        return self._push_piece(token_id, self._lone_byte)

    def flush(self) -> str:
        """The stream is over: the text of what was held back, U+FFFD for bytes that are no
        characters.
        """
        text = self._decode(self._window + self._run)
        rest = text[self._num_settled :]
        self._num_settled = len(text)
        self._run = []
        return rest

    def _push_bytes(self, token_id: int) -> str:
        """Byte-level vocabularies: every token is bytes, and a decode is that of all bytes in a
        row.

        At most one U+FFFD at the end can be a character yet to be completed, the rest is settled.
        """
        self._window.append(token_id)
        text = self._decode(self._window)
        end = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._num_settled : end]
        self._num_settled = end
        if len(self._window) > _MAX_WINDOW:
            del self._window[:-_NUM_CONTEXT]
            text = self._decode(self._window)
            self._num_settled = len(text) - text.endswith(_REPLACEMENT)
        return piece

    def _push_piece(self, token_id: int, lone_byte: int) -> str:
        """Vocabularies of text pieces with bytes as fallback.

        A run of byte tokens is decoded as one: a bad byte at its end turns all of it into U+FFFD,
        so it is settled by the next token that is text. The last settled token stays as context,
        for a decode strips a leading space.
        """
        self._run.append(token_id)
        if self._decode([token_id, lone_byte]) == 2 * _REPLACEMENT:
            return ""
        piece = self.flush()
        self._window = [token_id]
        self._num_settled = len(self._decode(self._window))
        return piece

    def _is_silent(self, token_id: int) -> bool:
        """Special and unknown ids; the pair tells them from a piece that is one space, stripped
        when it leads.
        """
        return not self._decode([token_id]) and not self._decode([token_id, token_id])


@lru_cache(maxsize=8)
def _lone_byte(tokenizer: Tokenizer) -> int | None:
    """None for a byte-level vocabulary, else the id of a byte that begins a character, or an unused
    id where tokens carry no bytes.

    The two kinds differ in what a bad byte does to the character before it. Not every byte has a
    token: vocabularies leave out some that no text of their training had.
    """
    lead = follower = None
    for token_id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        if len(raw) != 1 or raw < b"\x80" or tokenizer.decode([token_id]) != _REPLACEMENT:
            continue
        if b"\xc2" <= raw <= b"\xdf":
            lead = token_id
        elif raw <= b"\xbf":
            follower = token_id
        if lead is not None and follower is not None:
            fallback = tokenizer.decode([lead, follower, follower]) == 3 * _REPLACEMENT
            return lead if fallback else None
    return tokenizer.vocab_size
