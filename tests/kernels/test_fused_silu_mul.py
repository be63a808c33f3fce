"""SwiGLU's elementwise part in one launch: what silu_mul.py gives in float32, rounded once."""

import pytest
import torch

from engine.kernels import silu_mul as reference
from engine.kernels.fused_silu_mul import silu_mul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(gate_up: torch.Tensor) -> None:
    before = gate_up.clone()
    expected = reference.silu_mul(gate_up.float()).to(gate_up.dtype)
    found = silu_mul(gate_up)
    assert found.is_contiguous() and torch.equal(gate_up, before)
    tolerance = TOLERANCE[gate_up.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def random(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(tokens + width)
    return (torch.randn(tokens, 2 * width) * 3).to(DEVICE, dtype)


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 1024), (3, 1100), (2, 1), (0, 8)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_as_reference(tokens: int, width: int, dtype: torch.dtype) -> None:
    check(random(tokens, width, dtype))


def test_strided_tokens() -> None:
    check(random(4, 32, torch.float32)[:, 16:56])


def test_large_gates() -> None:
    gates = torch.tensor([[-80.0, -20.0, 0.0, 20.0, 200.0]], device=DEVICE)
    check(torch.cat((gates, torch.ones_like(gates)), dim=1))


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(4), r"gate_up is \(4,\)"),
        (torch.zeros(4, 7), r"gate_up is \(4, 7\)"),
        (torch.zeros(8, 4).t(), "gate_up is"),
        (torch.zeros(4, 8, dtype=torch.float64), "gate_up is torch.float64"),
    ],
)
def test_what_is_refused(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        silu_mul(gate_up.to(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_shapes(tokens: int, dtype: torch.dtype) -> None:
    check(random(tokens, 14336, dtype))
