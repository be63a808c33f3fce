"""Sampling ops against a slow reference in Python integers, at the edges of every parameter."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import sampling
from engine.kernels.sampling import counter_uniform, greedy_tokens, sample_tokens, token_logprobs

MASK = (1 << 64) - 1
INF = float("inf")


def uniform_reference(seed: int, position: int) -> float:
    """The documented hash in unsigned Python integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    state = mix(seed + gamma & MASK) + (position + 1) * gamma & MASK
    return (mix(state) >> 11) * 2.0**-53


def draw_reference(logits: list[float], t: float, k: int, p: float, m: float, u: float) -> int:
    """One row, token by token: order, weights, top_k, top_p, min_p, inverse CDF."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:k]
    peak = logits[order[0]]
    shares = [1.0] + [math.exp((logits[token] - peak) / t) for token in order[1:]]
    weights = [int(share * 2**40) for share in shares]
    kept, before = [], 0
    for weight in weights:
        if kept and (before >= p * sum(weights) or weight < m * 2**40):
            break
        kept.append(weight)
        before += weight
    target = int(u * sum(kept))
    for token, weight in zip(order, kept, strict=False):
        if target < weight:
            return token
        target -= weight
    raise AssertionError("u is below 1")


def columns(rows: list[tuple[float, int, float, float, float]]) -> list[torch.Tensor]:
    dtypes = [torch.float64, torch.int64, torch.float64, torch.float64, torch.float64]
    return [torch.tensor(c, dtype=d) for c, d in zip(zip(*rows, strict=True), dtypes, strict=True)]


def mixed_batch(seed: int, vocab_size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows of ties, of -inf and of plain noise; parameters from off to extreme."""
    choose = random.Random(seed)
    noise = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    noise[::3] = noise[::3].round()
    noise[1::3][noise[1::3] < 0] = -INF
    noise[:, choose.randrange(vocab_size)] = 1.0
    rows = [
        (
            choose.choice([1e-300, 1e-6, 0.3, 1.0, 4.0, 1e6]),
            choose.choice([1, 2, 7, 40, vocab_size - 1, vocab_size, vocab_size + 9]) or 1,
            choose.choice([1e-9, 0.1, 0.5, 0.95, 1.0, 1.0]),
            choose.choice([0.0, 0.0, 0.02, 0.6, 1.0]),
            choose.choice([0.0, choose.random(), choose.random(), 1 - 2.0**-53]),
        )
        for _ in range(len(noise))
    ]
    return noise, columns(rows)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), vocab_size=st.sampled_from([1, 2, 37, 257, 1500]))
def test_draws_equal_the_reference(seed: int, vocab_size: int) -> None:
    logits, params = mixed_batch(seed, vocab_size)
    expected = [
        draw_reference(row, *(column[i].item() for column in params))
        for i, row in enumerate(logits.tolist())
    ]
    assert sample_tokens(logits, *params).tolist() == expected


@pytest.mark.parametrize("num_leading", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sorting_and_cutting_into_chunks_change_no_token(
    num_leading: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        logits, params = mixed_batch(seed, 301)
        logits = logits.to(dtype)
        monkeypatch.setattr(sampling, "NUM_LEADING", 301)
        whole = sample_tokens(logits, *params)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "NUM_LEADING", num_leading)
            patch.setattr(sampling, "CHUNK_LOGITS", 5 * 301)
            assert sample_tokens(logits, *params).tolist() == whole.tolist()


@pytest.mark.parametrize("vocab_size", [5, 1500])
@pytest.mark.parametrize("top_p", [1e-9, 0.9, 1.0])
def test_a_hopeless_row_still_gives_a_token_of_the_vocabulary(
    vocab_size: int, top_p: float
) -> None:
    logits = torch.zeros(3, vocab_size)
    logits[0], logits[1], logits[2, 1::2] = -INF, float("nan"), INF
    ids = sample_tokens(logits, *columns([(1.0, vocab_size, top_p, 0.0, 0.7)] * 3))
    assert ids.tolist() == [0, 0, 1]


def test_minus_zero_is_zero() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0]])
    assert sample_tokens(logits, *columns([(1.0, 1, 1.0, 0.0, 0.9)])).tolist() == [0]


@given(
    seed=st.one_of(st.integers(0, 2**63 - 1), st.sampled_from([0, 2**63 - 1])),
    position=st.integers(0, 2**31),
)
def test_the_hash_wraps_like_unsigned_integers(seed: int, position: int) -> None:
    found = counter_uniform(torch.tensor([seed]), torch.tensor([position])).item()
    assert found == uniform_reference(seed, position)
    assert 0.0 <= found < 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_and_logprobs(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 99, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[2, [7, 50]] = 9.0
    ids = greedy_tokens(logits)
    assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()]
    chosen, top, top_ids = token_logprobs(logits, ids, 4)
    expected = torch.log_softmax(logits.float(), -1)
    torch.testing.assert_close(chosen, expected.gather(-1, ids[:, None])[:, 0])
    torch.testing.assert_close(top, expected.sort(-1, descending=True).values[:, :4])
    torch.testing.assert_close(top, expected.gather(-1, top_ids))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [301, 49152, 128257])
def test_cuda_draws_the_same_tokens(vocab_size: int) -> None:
    for seed in range(5):
        logits, params = mixed_batch(seed, vocab_size)
        seeds, positions = torch.arange(24) * 2**57, torch.arange(24) + seed
        params[-1] = counter_uniform(seeds, positions)
        there = [column.cuda() for column in params[:-1]]
        there.append(counter_uniform(seeds.cuda(), positions.cuda()))
        assert there[-1].tolist() == params[-1].tolist()
        found = sample_tokens(logits.cuda(), *there)
        assert found.tolist() == sample_tokens(logits, *params).tolist()
