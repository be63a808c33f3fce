"""Paged attention against plain softmax attention over each row's own tokens, pages scattered at
random.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import KernelsConfig, KernelSet
from engine.kernels.decode_attention import decode_workspace
from engine.layers.attention import Rotation
from engine.runtime.attention import PagedAttention, RowContext, open_attention

HEADS, KV_HEADS, DIM, PAGE, NUM_PAGES = 6, 2, 16, 4, 64


class Pool:
    """What the backend needs of a KV pool."""

    page_size = PAGE
    num_pages = null_page = NUM_PAGES

    def __init__(self) -> None:
        self.layers = [torch.full((2, NUM_PAGES + 1, KV_HEADS, PAGE, DIM), 1e3)]


class Spec:
    def __init__(self, window: int | None) -> None:
        self.sliding_window = window


class Model:
    kv_shape = (KV_HEADS, DIM, 1)
    dtype = torch.float32

    def __init__(self, window: int | None) -> None:
        self.spec = Spec(window)


class Cpu:
    torch_device = torch.device("cpu")


class Layer:
    """An attention layer whose q and k are neither normed nor rotated."""

    layer, num_heads, num_kv_heads = 0, HEADS, KV_HEADS
    q_norm = k_norm = None

    def rotated(self, qkv: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        return qkv.view(-1, HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)


def attend(
    backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prepared: object
) -> torch.Tensor:
    cos = torch.ones(len(q), 1, DIM)
    qkv = torch.cat((q, k, v), 1).flatten(1)
    out: torch.Tensor = backend.attend(
        Layer(), qkv, Rotation(cos, torch.zeros_like(cos)), FakeStep(prepared)
    )
    return out


class FakeStep:
    def __init__(self, attention: object) -> None:
        self.attention = attention


def backend_of(kernels: KernelSet, pool: Pool, window: int | None) -> Any:
    """The backend that the config names, over `pool`."""
    workspace = decode_workspace(
        max_rows=8, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, max_tokens=128, num_sms=40,
        device=Cpu.torch_device,
    )  # fmt: skip
    cfg, space = KernelsConfig(attention=kernels), SimpleNamespace(decode=workspace)
    return open_attention(cfg, pool, Model(window), Cpu(), space)  # type: ignore[arg-type]


NEEDS_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the tensors are the CPU's"
)
BACKENDS = [KernelSet.reference, pytest.param(KernelSet.triton, marks=NEEDS_INTERPRETER)]


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """q [n, H, D] at positions start.. over k, v [start + n, K, D]."""
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        position = start + i
        low = 0 if window is None else max(0, position - window + 1)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = k[low : position + 1, kv] @ q[i, head] / math.sqrt(DIM)
            out[i, head] = scores.softmax(0) @ v[low : position + 1, kv]
    return out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("kernels", BACKENDS)
def test_chunked_prefill_and_decode_of_a_mixed_batch(
    kernels: KernelSet, window: int | None, chunk: int
) -> None:
    torch.manual_seed(chunk)
    pool = Pool()
    backend = backend_of(kernels, pool, window)
    lengths = [1, 4, 9, 23, 17]
    pages = np.random.default_rng(chunk).permutation(NUM_PAGES).tolist()
    owned = [[pages.pop() for _ in range(-(-length // PAGE))] for length in lengths]
    qs = [torch.randn(length, HEADS, DIM) for length in lengths]
    ks = [torch.randn(length, KV_HEADS, DIM) for length in lengths]
    vs = [torch.randn(length, KV_HEADS, DIM) for length in lengths]
    done = [0] * len(lengths)
    results: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        active = [i for i, n in enumerate(lengths) if done[i] < n]
        spans = {i: (done[i], min(lengths[i], done[i] + chunk)) for i in active}
        rows = [RowContext(owned[i], start, stop - start) for i, (start, stop) in spans.items()]
        prepared = backend.prepare(rows)
        q, k, v = (
            torch.cat([source[i][start:stop] for i, (start, stop) in spans.items()])
            for source in (qs, ks, vs)
        )
        out = attend(backend, q, k, v, prepared).view(-1, HEADS, DIM)
        offset = 0
        for i, (start, stop) in spans.items():
            results[i].append(out[offset : offset + stop - start])
            offset += stop - start
            done[i] = stop
    for i in range(len(lengths)):
        torch.testing.assert_close(
            torch.cat(results[i]), naive(qs[i], ks[i], vs[i], 0, window), atol=1e-5, rtol=1e-5
        )


def test_padding_reads_the_null_page_only() -> None:
    """Two rows of 2 and 3 pages are one group; every page that they do not own holds NaN."""
    pool = Pool()
    (cache,) = pool.layers
    cache.fill_(torch.nan)
    owned = [[7, 1], [5, 9, 2]]
    cache[:, [*owned[0], *owned[1], pool.null_page]] = 0.0
    backend = PagedAttention(KernelsConfig(), pool, Model(None), Cpu())  # type: ignore[arg-type]
    rows = [RowContext(pages, len(pages) * PAGE - 2, 1) for pages in owned]
    paged = backend.prepare(rows)
    assert len(paged.decode) == 1
    q, k, v = (torch.randn(2, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    assert attend(backend, q, k, v, paged).isfinite().all()
    assert (cache[:, pool.null_page] == 0).all()
