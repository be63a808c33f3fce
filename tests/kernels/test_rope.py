"""Rotary embedding: rotations keep lengths, compose, and leave what lies beyond rotary_dim."""

import torch

from engine.kernels.rope import apply_rope


def cos_sin(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    angles = (positions[:, None].double() * frequencies)[:, None]
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def test_each_pair_is_rotated_by_its_angle() -> None:
    x = torch.randn(6, 3, 16)
    cos, sin = cos_sin(torch.arange(6), 16)
    y = apply_rope(x, cos, sin)
    before = torch.complex(x[..., :8], x[..., 8:])
    after = torch.complex(y[..., :8], y[..., 8:])
    turn = torch.complex(cos[..., :8], sin[..., 8:])
    torch.testing.assert_close(after, before * turn)


def test_partial_rotation_leaves_the_rest() -> None:
    x = torch.randn(4, 2, 16)
    y = apply_rope(x, *cos_sin(torch.arange(4), 8))
    assert y.shape == x.shape
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.equal(y[1:, :, :8], x[1:, :, :8])


def test_a_view_is_read_and_left_alone() -> None:
    fused = torch.randn(5, 6, 16)
    before = fused.clone()
    cos, sin = cos_sin(torch.arange(5), 16)
    assert torch.equal(
        apply_rope(fused[:, :4], cos, sin), apply_rope(before[:, :4].clone(), cos, sin)
    )
    assert torch.equal(fused, before)
