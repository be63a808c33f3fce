"""Log-probabilities in the shapes of the two APIs, a token at a time.

Tokens are told by their text, with U+FFFD for bytes that are no UTF-8 by themselves.
"""

from collections.abc import Iterable

from engine.server.answers import ChatTokenLogprob, CompletionLogprobs, TopLogprob
from engine.server.front import FrontEnd
from engine.server.messages import Logprobs


def chat_entry(front: FrontEnd, token_id: int, found: Logprobs) -> ChatTokenLogprob:
    """One token for /v1/chat/completions."""
    top = [
        TopLogprob(front.token_text(other), value, list(front.token_bytes(other)))
        for other, value in found.top
    ]
    return ChatTokenLogprob(
        front.token_text(token_id), found.logprob, list(front.token_bytes(token_id)), top
    )


class CompletionTally:
    """Lists of one choice of /v1/completions, whole or cut into chunks."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self._offset = 0
        self._open = CompletionLogprobs([], [], [], [])

    def add(self, token_id: int, found: Logprobs | None) -> None:
        """One more token; `found` is None for a prompt's first."""
        text = self._front.token_text(token_id)
        own = self._open
        own.tokens.append(text)
        own.text_offset.append(self._offset)
        own.token_logprobs.append(None if found is None else found.logprob)
        own.top_logprobs.append(None if found is None else self._top(text, found))
        self._offset += len(text)

    def add_prompt(self, ids: Iterable[int], found: Iterable[Logprobs | None]) -> None:
        for token_id, one in zip(ids, found, strict=True):
            self.add(token_id, one)

    def take(self) -> CompletionLogprobs:
        """What was added since the last call."""
        taken, self._open = self._open, CompletionLogprobs([], [], [], [])
        return taken

    def _top(self, text: str, found: Logprobs) -> dict[str, float]:
        """By text; of tokens with the same text the likeliest counts. The chosen one is always
        in it.
        """
        top: dict[str, float] = {}
        for token_id, value in found.top:
            top.setdefault(self._front.token_text(token_id), value)
        top.setdefault(text, found.logprob)
        return top
