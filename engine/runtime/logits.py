"""What requests ask of their logits before a token is chosen: grammars, bans, biases, penalties.

Owns each request's state and the order in which rows are changed; the arithmetic is in
`engine.kernels.logit_changes`. A state depends on the request's prompt and answer alone, so that a
request which is computed anew goes on where it was.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.kernels.logit_changes import add_bias, ban_tokens, keep_allowed, penalize
from engine.runtime.request import Request
from engine.text.grammar import GrammarMatcher

# Tokens of a row and a number for each.
_Weighted = tuple[np.ndarray, np.ndarray]


class LogitsState:
    """One request's wishes, and how far its answer has come in them."""

    def __init__(
        self,
        request: Request,
        end_ids: frozenset[int],
        matcher: GrammarMatcher | None,
        bad_words: tuple[tuple[int, ...], ...],
        vocab_size: int,
    ) -> None:
        """`end_ids`: the model's end tokens; `bad_words`: as token ids, none empty; `vocab_size`:
        width of the logits, ids beyond it are left alone.
        """
        params = request.params
        self._request = request
        self._matcher = matcher
        self._bad_words = tuple(ids for ids in bad_words if ids[-1] < vocab_size)
        self._num_seen = 0
        stop_ids = frozenset(params.stop_token_ids)
        self._ends = _within(stop_ids if params.ignore_eos else stop_ids | end_ids, vocab_size)
        self._ends_of_model = _within(end_ids, vocab_size)
        self._bias = _weighted(params.logit_bias)
        self.penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._counts: _Counts | None = None
        if self.penalties != _NO_PENALTIES:
            prompt_ids = request.prompt_ids if params.repetition_penalty != 1.0 else ()
            self._counts = _Counts(prompt_ids, params.max_tokens)

    @property
    def active(self) -> bool:
        """Whether the next token's logits are to be changed at all."""
        lasting = self._matcher or self._bad_words or self._counts or len(self._bias[0])
        return bool(lasting) or self._too_short

    @property
    def ended(self) -> bool:
        """Whether the grammar is complete and nothing but an end token may follow."""
        self._advance()
        return self._matcher is not None and self._matcher.ended

    @property
    def error(self) -> str:
        """Why the grammar cannot go on; empty if all is well."""
        self._advance()
        return "" if self._matcher is None else self._matcher.error

    @property
    def _too_short(self) -> bool:
        return len(self._request.output_ids) < self._request.params.min_tokens

    def _advance(self) -> None:
        """Take in what the answer has become since the last time."""
        for token_id in self._request.output_ids[self._num_seen :]:
            if self._matcher is not None:
                self._matcher.accept(token_id)
            if self._counts is not None:
                self._counts.add(token_id)
        self._num_seen = len(self._request.output_ids)

    def allowed(self) -> torch.Tensor | None:
        """Mask of the grammar, int32 [words]; None without one. End tokens are left out before
        min_tokens, or always if the model's are to be ignored, as long as anything else may come.
        """
        self._advance()
        if self._matcher is None:
            return None
        held_back = self._ends if self._too_short else frozenset()
        if self._request.params.ignore_eos:
            held_back |= self._ends_of_model
        return self._matcher.allowed(held_back)

    def banned_ids(self) -> set[int]:
        """Tokens that would complete a bad word or, where no grammar decides, end too early."""
        output_ids = self._request.output_ids
        found = {
            ids[-1]
            for ids in self._bad_words
            if len(ids) == 1 or tuple(output_ids[1 - len(ids) :]) == ids[:-1]
        }
        return found | self._ends if self._matcher is None and self._too_short else found

    def bias(self) -> _Weighted:
        """Token ids int64 and what is added to their logits, float32."""
        return self._bias

    def counts(self) -> _Weighted:
        """Token ids int64 that penalties touch and how often the answer has them, float32."""
        self._advance()
        return _NOTHING if self._counts is None else self._counts.weighted()


def process_logits(logits: torch.Tensor, states: Sequence[LogitsState]) -> None:
    """Change logits float32 [N, V] in place, row i as `states[i]` wants it.

    In this order: tokens that a grammar does not allow, bad words and early ends become -inf;
    biases are added; penalties of repetition, presence and frequency are taken off.
    """
    device = logits.device
    masks = [state.allowed() for state in states]
    given = [mask for mask in masks if mask is not None]
    if given:
        everything = torch.full_like(given[0], -1)
        bits = [everything if mask is None else mask for mask in masks]
        keep_allowed(logits, torch.stack(bits).to(device))
    banned = [_weighted((token_id, 0.0) for token_id in state.banned_ids()) for state in states]
    if pairs := _pairs(banned, device):
        ban_tokens(logits, *pairs[:2])
    if pairs := _pairs([state.bias() for state in states], device):
        add_bias(logits, *pairs)
    if pairs := _pairs([state.counts() for state in states], device):
        penalties = torch.tensor([state.penalties for state in states], device=device)
        penalize(logits, *pairs, penalties)


class _Counts:
    """Distinct tokens in the order of their coming; counts of the answer's, 0 for the prompt's."""

    def __init__(self, prompt_ids: Iterable[int], max_new: int) -> None:
        self._place_of = {
            token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))
        }
        num_known = len(self._place_of)
        self._ids = np.zeros(num_known + max_new, dtype=np.int64)
        self._ids[:num_known] = list(self._place_of)
        self._counts = np.zeros(num_known + max_new, dtype=np.float32)

    def add(self, token_id: int) -> None:
        place = self._place_of.setdefault(token_id, len(self._place_of))
        self._ids[place] = token_id
        self._counts[place] += 1

    def weighted(self) -> _Weighted:
        num_known = len(self._place_of)
        return self._ids[:num_known], self._counts[:num_known]


def _weighted(pairs: Iterable[tuple[int, float]]) -> _Weighted:
    found = list(pairs)
    ids = np.array([token_id for token_id, _ in found], dtype=np.int64)
    return ids, np.array([value for _, value in found], dtype=np.float32)


def _within(ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    return frozenset(token_id for token_id in ids if token_id < vocab_size)


def _pairs(
    rows: Sequence[_Weighted], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """All rows' tokens: rows, ids int64 [K] and numbers float32 [K]; None if there are none."""
    ids = np.concatenate([ids for ids, _ in rows])
    if not len(ids):
        return None
    where = np.repeat(np.arange(len(rows)), [len(ids) for ids, _ in rows])
    values = np.concatenate([values for _, values in rows])
    return (
        torch.from_numpy(where).to(device),
        torch.from_numpy(ids).to(device),
        torch.from_numpy(values).to(device),
    )


_NO_PENALTIES = (1.0, 0.0, 0.0)
_NOTHING = _weighted(())
