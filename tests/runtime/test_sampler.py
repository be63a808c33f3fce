"""Sampling against a slow reference, its distribution, its independence of the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import DeviceConfig
from engine.device import Device
from engine.kernels.sampling import counter_uniform
from engine.runtime.sampler import Sampler, SamplingRow
from engine.runtime.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(Device(DeviceConfig()))


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top_k, top_p, min_p, token by token."""
    scaled = (logits - logits.max()) / params.temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    order = np.lexsort((np.arange(len(logits)), -logits))
    if params.top_k:
        order = order[: params.top_k]
    mass = probabilities[order].sum()
    kept, before = [], 0.0
    for token in order:
        if before >= params.top_p * mass and kept:
            break
        kept.append(token)
        before += probabilities[token]
    kept = [t for t in kept if probabilities[t] >= params.min_p * probabilities[order[0]]]
    result = np.zeros(len(logits))
    result[kept] = probabilities[kept]
    return result / result.sum()


random_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(params=random_params, vocab=st.sampled_from([3, 17, 1500]), seed=st.integers(0, 2**40))
def test_draws_are_the_inverse_cdf_of_the_filtered_distribution(
    params: SamplingParams, vocab: int, seed: int
) -> None:
    sampler = Sampler(Device(DeviceConfig()))
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed % 1000)) * 2
    rows = [SamplingRow(params, seed, position) for position in range(20)]
    drawn = sampler.sample(logits.expand(20, -1), rows).token_ids.tolist()
    probabilities = filtered(logits.double().numpy(), params)
    order = np.lexsort((np.arange(vocab), -logits.numpy()))
    edges = np.cumsum(probabilities[order])
    seeds = torch.full((20,), seed)
    uniform = counter_uniform(seeds, torch.arange(20)).numpy()
    for token, u in zip(drawn, uniform, strict=True):
        place = int(np.flatnonzero(order == token)[0])
        low = edges[place - 1] if place else 0.0
        assert low - 1e-6 <= u <= edges[place] + 1e-6, "up to rounding at an edge"
        assert probabilities[token] > 0


def test_many_positions_follow_the_softmax(sampler: Sampler) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    params = SamplingParams(temperature=1.0)
    count = 20000
    rows = [SamplingRow(params, 5, position) for position in range(count)]
    drawn = sampler.sample(logits.expand(count, -1), rows).token_ids.bincount(minlength=5).numpy()
    expected = logits.softmax(-1).numpy() * count
    assert drawn[4] == 0
    chi_square = ((drawn[:4] - expected[:4]) ** 2 / expected[:4]).sum()
    assert chi_square < 16.3, "3 degrees of freedom, p = 0.001"


def test_uniform_numbers_are_spread_and_differ_by_seed_and_position() -> None:
    seeds = torch.arange(200).repeat_interleave(200)
    u = counter_uniform(seeds, torch.arange(200).repeat(200))
    assert len(u.unique()) == len(u)
    assert bool(((u >= 0) & (u < 1)).all())
    assert abs(u.mean().item() - 0.5) < 0.01
    assert abs(u.std().item() - 1 / math.sqrt(12)) < 0.01


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_row_alone_equals_the_row_in_any_batch(data: st.DataObject) -> None:
    sampler = Sampler(Device(DeviceConfig()))
    count = data.draw(st.integers(1, 6))
    logits = torch.randn(count, 300)
    one = st.one_of(random_params, st.just(SamplingParams()), st.just(SamplingParams(logprobs=3)))
    rows = [SamplingRow(data.draw(one), data.draw(st.integers(0, 99)), i) for i in range(count)]
    together = sampler.sample(logits, rows)
    for i, row in enumerate(rows):
        alone = sampler.sample(logits[i : i + 1], [row])
        assert alone.token_ids.item() == together.token_ids[i].item()
        assert (alone.logprobs[0] is None) == (together.logprobs[i] is None)


def test_greedy_takes_the_first_of_equals_and_logprobs_are_of_raw_logits(sampler: Sampler) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0]] * 2)
    hot = SamplingParams(temperature=5.0, top_k=1, logprobs=2)
    output = sampler.sample(
        logits, [SamplingRow(SamplingParams(logprobs=2), 0, 0), SamplingRow(hot, 0, 0)]
    )
    assert output.token_ids.tolist() == [1, 1]
    expected = logits[0].log_softmax(-1)
    for found in output.logprobs:
        assert found is not None
        assert found.logprob == pytest.approx(expected[1].item(), abs=1e-6)
        assert [token for token, _ in found.top] in ([1, 2], [2, 1])
        assert all(v == pytest.approx(expected[t].item(), abs=1e-6) for t, v in found.top)
