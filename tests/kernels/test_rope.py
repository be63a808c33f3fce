"""Rotary embedding: rotations keep lengths, compose, and leave what lies beyond rotary_dim."""

import torch

from engine.kernels.rope import apply_rope


def cos_sin(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = (positions[:, None].double() * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim))[
        :, None
    ]
    return angles.cos().float(), angles.sin().float()


def test_each_pair_is_rotated_by_its_angle() -> None:
    x = torch.randn(6, 3, 16)
    cos, sin = cos_sin(torch.arange(6), 16)
    y = x.clone()
    apply_rope(y, cos, sin)
    before = torch.complex(x[..., :8], x[..., 8:])
    after = torch.complex(y[..., :8], y[..., 8:])
    torch.testing.assert_close(after, before * torch.complex(cos, sin))


def test_partial_rotation_leaves_the_rest() -> None:
    x = torch.randn(4, 2, 16)
    y = x.clone()
    apply_rope(y, *cos_sin(torch.arange(4), 8))
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.equal(y[1:, :, :8], x[1:, :, :8])


def test_works_on_a_view_in_place() -> None:
    fused = torch.randn(5, 6, 16)
    view, rest = fused[:, :4], fused[:, 4:].clone()
    alone = view.clone()
    cos, sin = cos_sin(torch.arange(5), 16)
    apply_rope(view, cos, sin)
    apply_rope(alone, cos, sin)
    assert torch.equal(fused[:, :4], alone) and torch.equal(fused[:, 4:], rest)
