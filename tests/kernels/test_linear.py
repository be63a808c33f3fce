"""linear: both operand orders give x @ weight.T + bias."""

import pytest
import torch

from engine.kernels.linear import linear


@pytest.mark.parametrize("rows", [1, 2, 31, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows: int, dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 24).to(dtype), torch.randn(40, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    y = linear(x, weight, bias)
    assert y.is_contiguous()
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=2e-2)
