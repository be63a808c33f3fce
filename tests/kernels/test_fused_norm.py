"""Norms in one launch: what norm.py gives, for strided rows too."""

from typing import Any

import pytest
import torch

from engine.kernels import norm as reference
from engine.kernels.fused_norm import add_rms_norm, rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).to(DEVICE, dtype)


def check(x: torch.Tensor) -> None:
    weight = random(x.shape[-1], dtype=x.dtype)
    expected = reference.rms_norm(x, weight, EPS)
    found = rms_norm(x, weight, EPS)
    assert found.is_contiguous() and found.dtype is x.dtype
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def check_add(x: torch.Tensor, residual: torch.Tensor) -> None:
    """The sum's bits, too, but for bfloat16 in the interpreter, which rounds that towards zero."""
    weight = random(x.shape[-1], dtype=x.dtype)
    total, before = residual.clone(), x.clone()
    expected = reference.add_rms_norm(x, total, weight, EPS)
    found = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(x, before)
    assert found.is_contiguous() and found.dtype is x.dtype
    tolerance = TOLERANCE[x.dtype]
    exact = x.is_cuda or x.dtype is not torch.bfloat16
    torch.testing.assert_close(residual, total, atol=0, rtol=0 if exact else tolerance)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(48,), (3, 64), (2, 3, 80), (2, 1, 3, 7), (2, 1000), (0, 8)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(random(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_strided_rows(dtype: torch.dtype) -> None:
    qkv = random(4, 6, 16, dtype=dtype)
    check(qkv[:, :3])
    check(qkv[:, 3:5])
    check(qkv[:, 2])
    check(qkv.transpose(0, 1))
    check(qkv[:, None, 1:3])


def test_large_values() -> None:
    x = (random(2, 64) * 1e4).to(torch.bfloat16)
    check(x)
    check_add(x, x.flip(0))


@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (0, 8)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_add(random(*shape, dtype=dtype), random(2, *shape, dtype=dtype)[1])


def test_strided_add() -> None:
    wide, other = random(5, 3, 32), random(5, 2, 32)
    untouched = other[:, 0].clone()
    check_add(wide[:, 2], other[:, 1])
    assert torch.equal(other[:, 0], untouched)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weight": torch.zeros(8, 8)}, r"weight is \(8, 8\)"),
    ({"weight": torch.zeros(16385)}, "weight is"),
    ({"weight": torch.zeros(16)[::2]}, "weight is"),
    ({"weight": torch.zeros(9)}, r"x is \(4, 8\).*\[..., 9\]"),
    ({"weight": torch.zeros(8, dtype=torch.float16)}, "x and weight are"),
    ({"weight": torch.zeros(8, device="meta")}, "weight is on meta"),
    ({"x": torch.zeros(8, 4).t()}, "x is"),
    ({"x": torch.zeros(4, 8, dtype=torch.float64)}, "x and weight are"),
    ({"x": torch.zeros(3, 8)}, r"x and residual are \(3, 8\) and \(4, 8\)"),
    ({"residual": torch.zeros(4, 8, dtype=torch.float16)}, "residual and weight are"),
    ({"residual": torch.zeros(4, 16)[:, ::2]}, "residual is"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"x": torch.zeros(4, 8), "residual": torch.zeros(4, 8), "weight": torch.zeros(8)}
    placed = {
        name: tensor if tensor.is_meta else tensor.to(DEVICE)
        for name, tensor in (given | change).items()
    }
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**placed, eps=EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 4096])
@pytest.mark.parametrize("hidden", [2560, 4096, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_shapes(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = random(2, tokens, hidden, dtype=dtype)
    check(x)
    check_add(x, residual)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 4096])
def test_real_heads(tokens: int) -> None:
    qkv = random(tokens, 48, 128, dtype=torch.bfloat16)
    check(qkv[:, :32])
    check(qkv[:, 32:40])
