"""An adapter as the rank pool wants it: whole row ranges of each layer in the pool's dtype, in host
memory (pinned, if they go to a card), so that making it resident is copies and no arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.lora.adapter import AdapterLayout, HostAdapter
from engine.lora.base import scaled_b


@dataclass(frozen=True, slots=True)
class LayerImage:
    """Rows of one layer: `a` [rows, members, in] and `b` [rows, out]."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class PoolImage:
    """`layers` in the pool's order, None where the adapter changes nothing; `saved` matrices
    [vocab, hidden] by module.
    """

    layout: AdapterLayout
    layers: Sequence[LayerImage | None]
    saved: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MemberRows:
    """One projection of a layer in the image's b: columns `column`..`column + width`, which are
    outputs `out_start`.. of the whole module; its inputs begin at `in_start`.
    """

    name: str
    column: int
    width: int
    in_start: int
    out_start: int


@torch.inference_mode()
def layer_image(
    adapter: HostAdapter,
    layout: AdapterLayout,
    members: Sequence[MemberRows],
    num_rows: int,
    width_in: int,
    dtype: torch.dtype,
    pinned: bool,
) -> LayerImage | None:
    """Rows of a layer of `members`. All that multiplies a pair is folded into b in float32 before
    the one cast to `dtype`.
    """
    if not any(own.name in adapter.pairs or own.name in adapter.vectors for own in members):
        return None
    shape = (num_rows, len(members), width_in)
    width_out = sum(own.width for own in members)
    a = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
    b = torch.zeros((num_rows, width_out), dtype=dtype, pin_memory=pinned)
    for index, own in enumerate(members):
        columns = b[:, own.column : own.column + own.width]
        pair, vectors = adapter.pairs.get(own.name), adapter.vectors.get(own.name)
        if pair is not None:
            a[: pair.rank, index].copy_(pair.a.narrow(1, own.in_start, width_in))
            scaled = scaled_b(pair, vectors).narrow(0, own.out_start, own.width)
            columns[: pair.rank].copy_(scaled.t())
        if vectors is not None and vectors.bias is not None:
            columns[layout.bias_row].copy_(vectors.bias.narrow(0, own.out_start, own.width))
        if vectors is not None and vectors.gain is not None:
            columns[layout.gain_row].copy_(vectors.gain.narrow(0, own.out_start, own.width) - 1)
    return LayerImage(a, b)


def saved_image(matrix: torch.Tensor, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """A saved module's matrix in the pool's dtype."""
    matrix = matrix.to(dtype)
    return matrix.pin_memory() if pinned else matrix
