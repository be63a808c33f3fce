"""RMSNorm against the formula in float64."""

import torch

from engine.kernels.norm import add_rms_norm, rms_norm


def expected(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rms_norm() -> None:
    x, weight = torch.randn(3, 5, 48), torch.randn(48)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), expected(x, weight, 1e-5), atol=1e-5, rtol=1e-5
    )


def test_rms_norm_keeps_dtype_and_survives_large_values() -> None:
    x = (torch.randn(4, 64) * 1e4).to(torch.bfloat16)
    y = rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-6)
    assert y.dtype is torch.bfloat16 and bool(y.isfinite().all())


def test_add_rms_norm_adds_in_place() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    total = x + residual
    y = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(y.double(), expected(total, weight, 1e-5), atol=1e-5, rtol=1e-5)
