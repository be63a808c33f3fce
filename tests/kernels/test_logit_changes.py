"""Changes of logits against loops over tokens, and against transformers where it has the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from engine.kernels.logit_changes import (
    add_bias,
    ban_tokens,
    finite_peak,
    keep_allowed,
    num_mask_words,
    penalize,
)

INF = float("inf")


@settings(max_examples=50, deadline=None)
@given(data=st.data(), vocab_size=st.integers(1, 140), num_rows=st.integers(1, 4))
def test_masks_keep_what_their_bits_say(
    data: st.DataObject, vocab_size: int, num_rows: int
) -> None:
    num_words = num_mask_words(vocab_size) + data.draw(st.integers(0, 2))
    words = st.integers(-(2**31), 2**31 - 1)
    rows = st.lists(words, min_size=num_words, max_size=num_words)
    bits = data.draw(st.lists(rows, min_size=num_rows, max_size=num_rows))
    before = torch.randn(num_rows, vocab_size)
    before[:, ::7] = -INF
    after = before.clone()
    keep_allowed(after, torch.tensor(bits, dtype=torch.int32))
    for row in range(num_rows):
        for token in range(vocab_size):
            allowed = bits[row][token // 32] >> token % 32 & 1
            expected = before[row, token].item() if allowed else -INF
            assert after[row, token].item() == expected


def test_bans_and_biases_touch_single_tokens() -> None:
    before = torch.randn(3, 9)
    after = before.clone()
    rows, ids = torch.tensor([0, 0, 2]), torch.tensor([1, 8, 1])
    add_bias(after, rows, ids, torch.tensor([0.5, -100.0, 3.0]))
    ban_tokens(after, torch.tensor([2, 1]), torch.tensor([0, 5]))
    expected = before.clone()
    expected[0, 1] += 0.5
    expected[0, 8] += -100.0
    expected[2, 1] += 3.0
    expected[2, 0] = expected[1, 5] = -INF
    assert torch.equal(after, expected)


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 19), max_size=12),
    answer=st.lists(st.integers(0, 19), min_size=1, max_size=12),
    repetition=st.floats(0.1, 5.0),
    presence=st.floats(-2.0, 2.0),
    frequency=st.floats(-2.0, 2.0),
)
def test_penalties_are_those_of_transformers_and_of_the_definition(
    prompt: list[int], answer: list[int], repetition: float, presence: float, frequency: float
) -> None:
    before = torch.randn(1, 20, generator=torch.Generator().manual_seed(len(prompt)))
    before[0, 3] = -INF
    tokens = list(dict.fromkeys(prompt + answer))
    where = torch.zeros(len(tokens), dtype=torch.int64), torch.tensor(tokens)
    counts = torch.tensor([float(answer.count(token)) for token in tokens])

    after = before.clone()
    penalize(after, *where, counts, torch.tensor([[repetition, 0.0, 0.0]]))
    oracle = RepetitionPenaltyLogitsProcessor(repetition)
    torch.testing.assert_close(after, oracle(torch.tensor([prompt + answer]), before.clone()))

    expected = after.clone()
    for token in set(answer):
        expected[0, token] -= presence + frequency * answer.count(token)
    after = before.clone()
    penalize(after, *where, counts, torch.tensor([[repetition, presence, frequency]]))
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_a_finite_peak_is_found(dtype: torch.dtype) -> None:
    logits = torch.zeros(5, 7, dtype=dtype)
    logits[0, 2] = float("nan")
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3, 1:] = -INF
    assert finite_peak(logits).tolist() == [False, False, False, True, True]
