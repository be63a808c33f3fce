"""What requests ask of their logits, against a slow reference that knows the whole request at
once.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from engine.config import DeviceConfig
from engine.device import Device
from engine.runtime.logits import LogitsState, process_logits
from engine.runtime.request import Request
from engine.runtime.sampler import Sampler, SamplingRow
from engine.runtime.sampling_params import SamplingParams

VOCAB = 23
END_IDS = frozenset({2, 5, 99})
INF = float("inf")
BadWords = tuple[tuple[int, ...], ...]

tokens = st.integers(0, VOCAB - 1)
some_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 1.5]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, 40), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
some_bad_words = st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(
    tuple
)


def request_for(params: SamplingParams, prompt: list[int], answer: list[int]) -> Request:
    return Request(0, list(prompt), params, 0, output_ids=list(answer))


def state_of(request: Request, bad_words: BadWords = ()) -> LogitsState:
    return LogitsState(request, END_IDS, None, bad_words, VOCAB)


def expected(
    logits: list[float], params: SamplingParams, bad: BadWords, prompt: list[int], out: list[int]
) -> list[float]:
    """One row, rule by rule, in the documented order."""
    found = list(logits)
    for word in bad:
        if out[len(out) - len(word) + 1 :] == list(word[:-1]) and len(out) >= len(word) - 1:
            found[word[-1]] = -INF
    if len(out) < params.min_tokens:
        for end in set(params.stop_token_ids) | (set() if params.ignore_eos else END_IDS):
            if end < VOCAB:
                found[end] = -INF
    for token, bias in params.logit_bias:
        found[token] += bias
    for token in range(VOCAB):
        if token in prompt or token in out:
            factor = params.repetition_penalty
            found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
        if token in out:
            found[token] -= params.presence_penalty + params.frequency_penalty * out.count(token)
    return found


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            some_params, some_bad_words, st.lists(tokens, min_size=1, max_size=9),
            st.lists(st.integers(0, 4), max_size=9),
        ),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_rows_of_a_batch_equal_the_definition(
    rows: list[tuple[SamplingParams, BadWords, list[int], list[int]]],
) -> None:
    before = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(rows)))
    states = [state_of(request_for(params, prompt, out), bad) for params, bad, prompt, out in rows]
    after = before.clone()
    process_logits(after, states)
    wanted = [
        expected(row, params, bad, prompt, out)
        for row, (params, bad, prompt, out) in zip(before.tolist(), rows, strict=True)
    ]
    torch.testing.assert_close(after, torch.tensor(wanted), atol=1e-4, rtol=1e-5)
    for index, state in enumerate(states):
        assert state.active or torch.equal(after[index], before[index])


@settings(max_examples=50, deadline=None)
@given(params=some_params, bad=some_bad_words, answer=st.lists(tokens, max_size=12))
def test_a_state_made_late_equals_one_that_saw_every_token(
    params: SamplingParams, bad: BadWords, answer: list[int]
) -> None:
    growing = request_for(params, [1, 2, 3], [])
    state = state_of(growing, bad)
    for length in range(len(answer) + 1):
        growing.output_ids[:] = answer[:length]
        late = state_of(request_for(params, [1, 2, 3], answer[:length]), bad)
        logits = torch.randn(2, VOCAB)
        logits[1] = logits[0]
        process_logits(logits, [state, late])
        assert torch.equal(*logits)
        assert state.active == late.active


@settings(max_examples=60, deadline=None)
@given(bad=some_bad_words.filter(bool), answer=st.lists(st.integers(0, 3), min_size=3, max_size=9))
def test_bad_words_are_banned_as_in_transformers(bad: BadWords, answer: list[int]) -> None:
    bad = tuple(tuple(token % 4 for token in word) for word in bad)
    logits = torch.randn(1, VOCAB)
    oracle = NoBadWordsLogitsProcessor([list(word) for word in set(bad)])
    wanted = oracle(torch.tensor([answer]), logits.clone())
    process_logits(logits, [state_of(request_for(SamplingParams(), [1], answer), bad)])
    assert torch.equal(logits, wanted)


def test_a_state_rests_when_the_answer_is_long_enough() -> None:
    request = request_for(SamplingParams(min_tokens=2), [1], [])
    state = state_of(request)
    for token, active in ((7, True), (8, True), (9, False)):
        assert state.active is active
        request.output_ids.append(token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_other_rows_keep_their_tokens_and_logprobs_are_of_the_raw_logits(
    dtype: torch.dtype, temperature: float
) -> None:
    sampler = Sampler(Device(DeviceConfig()))
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3)).to(dtype)
    raw = logits.clone()
    plain = SamplingParams(temperature=temperature, logprobs=VOCAB - 3)
    rows = [SamplingRow(plain, index, 4) for index in range(5)]
    alone = sampler.sample(logits, rows)
    forced = SamplingParams(temperature=temperature, logprobs=2, logit_bias=((11, 100.0),))
    hopeless = SamplingParams(temperature=temperature)
    every = tuple((token,) for token in range(VOCAB))
    rows[1] = SamplingRow(forced, 1, 4, state_of(request_for(forced, [1], [])))
    rows[3] = SamplingRow(hopeless, 3, 4, state_of(request_for(hopeless, [1], []), every))
    mixed = sampler.sample(logits, rows)
    assert torch.equal(logits, raw)
    for index in (0, 2, 4):
        assert mixed.token_ids[index] == alone.token_ids[index]
        assert mixed.logprobs[index] == alone.logprobs[index]
    assert mixed.token_ids[1] == 11
    found = mixed.logprobs[1]
    assert found is not None
    assert found.logprob == pytest.approx(raw[1].float().log_softmax(-1)[11].item(), abs=1e-6)
    assert mixed.open.tolist() == [True, True, True, False, True]
    assert mixed.finite.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_out_of_range_are_told_apart_from_rows_that_rule_out_all(temperature: float) -> None:
    sampler = Sampler(Device(DeviceConfig()))
    logits = torch.randn(3, VOCAB)
    logits[0, 4] = float("nan")
    logits[1, 4] = INF
    params = SamplingParams(temperature=temperature)
    output = sampler.sample(logits, [SamplingRow(params, 1, index) for index in range(3)])
    assert output.finite.tolist() == [False, False, True]
    assert 0 <= output.token_ids[2] < VOCAB
