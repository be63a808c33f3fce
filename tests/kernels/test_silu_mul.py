"""SwiGLU's elementwise part against its formula."""

import torch

from engine.kernels.silu_mul import silu_mul


def test_silu_mul() -> None:
    gate, up = torch.randn(7, 24), torch.randn(7, 24)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    torch.testing.assert_close(
        silu_mul(torch.cat((gate, up), -1)).double(), expected, atol=1e-5, rtol=1e-5
    )
