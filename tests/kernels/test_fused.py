"""The fused norm, silu and rope kernels against the plain ops: in the interpreter, and on a card at
the shapes of an 8B model.
"""

import pytest
import torch

from engine.kernels import fused_norm, fused_reference, fused_rope, fused_silu_mul, norm, silu_mul

HAS_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
LARGE = [pytest.param(tokens, 4096, marks=pytest.mark.gpu) for tokens in (1, 8, 64, 4096)]
DTYPES = [torch.float32, torch.bfloat16]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 100), *LARGE])
def test_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, residual = random(tokens, width, dtype=dtype), random(tokens, width, dtype=dtype)
    weight = random(width, dtype=dtype)
    close(fused_norm.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    sums = residual.clone()
    expected = norm.add_rms_norm(x, sums, weight, 1e-5)
    close(fused_norm.add_rms_norm(x, residual, weight, 1e-5), expected)
    close(residual, sums)
    if HAS_CARD or dtype is torch.float32:  # the interpreter cuts off what bf16 cannot hold
        assert torch.equal(residual, sums)


def test_norm_of_some_heads() -> None:
    heads = random(3, 6, 16, dtype=torch.float32)[:, 1:4]
    weight = random(16, dtype=torch.float32)
    close(fused_norm.rms_norm(heads, weight, 1e-5), norm.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 24), (5, 100), *LARGE])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(tokens, 2 * width, dtype=dtype)
    close(fused_silu_mul.silu_mul(gate_up), silu_mul.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotary"),
    [
        (3, 4, 2, 16, 16),
        (2, 3, 1, 80, 32),
        pytest.param(1, 32, 8, 128, 128, marks=pytest.mark.gpu),
        pytest.param(4096, 32, 8, 128, 128, marks=pytest.mark.gpu),
    ],
)
def test_rope_and_write(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    has_norm: bool,
    dtype: torch.dtype,
) -> None:
    """The last token is padding: it leaves the cache alone."""
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = random(tokens, rotary, dtype=dtype), random(tokens, rotary, dtype=dtype)
    weights = [random(dim, dtype=dtype) if has_norm else None for _ in range(2)]
    pages = tokens // 4 + 2
    slots = torch.randperm(pages * 4, device=DEVICE)[:tokens].int()
    if tokens > 1:
        slots[-1] = -1
    caches = [torch.zeros(2, pages, kv_heads, 4, dim, dtype=dtype, device=DEVICE) for _ in "ab"]
    q, expected = (
        module.rope_write_kv(qkv, cos, sin, cache, slots, heads, *weights, 1e-5)
        for module, cache in zip((fused_rope, fused_reference), caches, strict=True)
    )
    live = slots >= 0
    close(q[live], expected[live])
    assert q.isfinite().all()
    close(*caches)
    assert torch.equal(caches[0] == 0, caches[1] == 0)


def test_what_does_not_fit_is_refused() -> None:
    x = random(2, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x is \(2, 8\).*expected"):
        fused_norm.rms_norm(x, x[0, :4], 1e-5)
    with pytest.raises(ValueError, match=r"gate_up is \(2, 7\)"):
        fused_silu_mul.silu_mul(x[:, :7])
