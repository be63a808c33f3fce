"""linear: packed and plain weights give x @ weight.T + bias."""

import pytest
import torch

from engine.kernels.linear import has_blocked_layout, linear, pack_weight


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_linear(rows: int, dtype: torch.dtype, with_bias: bool, packed: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 24).to(dtype), torch.randn(40, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    y = linear(x, pack_weight(weight) if packed else weight, bias)
    assert y.is_contiguous() and y.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=2e-2)


def test_what_is_packed() -> None:
    assert has_blocked_layout("cpu", torch.float32) == torch.backends.mkldnn.is_available()
    assert not has_blocked_layout("cuda", torch.float32)
    meta = torch.empty(4, 4, device="meta")
    assert pack_weight(meta) is meta
