"""A projection over the rank pool in plain torch and float32, the measure of the kernels.

Shapes: T tokens, I in, O out, R rows of the pool, M members of a fused projection, P planes of a
base product split along I. Item by item and without a thought for speed. `linear_shrink` has the
signature of linear_shrink.py; `expanded_reference` is what a projection's consumer makes of it.
Knows nothing of who owns which rows.
"""

from collections.abc import Sequence

import torch

from engine.kernels.linear_shrink import Projected
from engine.kernels.lora_tables import BLOCK, TILE, Items, LoRATables


def linear_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    tables: LoRATables | None,
    workspace: object = None,
) -> Projected:
    """x [T, I], weight [O, I], a [R, M, I] -> y float32 [1, T, O], h [max_items, M, 16, 16] in x's
    dtype, zeros beyond the items' count. `workspace` is not used.
    """
    y = (x.float() @ weight.float().t())[None]
    if a is None or tables is None:
        return Projected(y, None)
    return Projected(y, shrink(x, a, tables.blocks))


def shrink(x: torch.Tensor, a: torch.Tensor, items: Items) -> torch.Tensor:
    """x [T, I], a [R, M, I] -> h [max_items, M, TILE, BLOCK] in x's dtype, by item and member: what
    the tile's tokens make of the block's rows, times their weights; tokens of weight 0 get 0.
    """
    h = x.new_zeros((items.max_items, a.shape[1], TILE, BLOCK))
    for item, tile, row, weights in _each(items):
        tokens = x[tile * TILE : (tile + 1) * TILE].float()
        weight = weights[: tokens.shape[0], None]
        for member in range(a.shape[1]):
            product = tokens @ a[row : row + BLOCK, member].float().t()
            h[item, member, : tokens.shape[0]] = _selected(weight, weight * product).to(x.dtype)
    return h


def expanded_reference(
    projected: Projected,
    b: torch.Tensor | None,
    tables: LoRATables | None,
    bias: torch.Tensor | None,
    widths: Sequence[int],
) -> torch.Tensor:
    """The projection's value, float32 [T, O]: planes, bias [O], gains, blocks' deltas and biases.

    b [R, O] and tables, or None: no adapters. `widths` are the members' parts of O, in order. With
    `projected.h` None there are no blocks' deltas, but gains and biases.
    """
    z = projected.y.float().sum(0)
    value = z.clone() if bias is None else z + bias.float()
    if b is not None and tables is not None:
        _add_deltas(value, z, projected.h, b, tables, widths)
    return value


def expand_add(
    y: torch.Tensor,
    h: torch.Tensor | None,
    b: torch.Tensor,
    tables: LoRATables,
    widths: Sequence[int],
    base_bias: torch.Tensor | None,
) -> None:
    """Add gains, blocks' deltas and biases to y [T, O], in place: the base product, with base_bias
    [O] already added if there is one. Arguments as those of lora_expand.py.
    """
    value = y.float()
    z = value.clone() if base_bias is None else value - base_bias.float()
    _add_deltas(value, z, h, b, tables, widths)
    y.copy_(value)


def _add_deltas(
    value: torch.Tensor,
    z: torch.Tensor,
    h: torch.Tensor | None,
    b: torch.Tensor,
    tables: LoRATables,
    widths: Sequence[int],
) -> None:
    """Add to value what adapters make of z, the base product without bias; both float32 [T, O]."""
    for _, tile, row, weights in _each(tables.gains):
        own = slice(tile * TILE, (tile + 1) * TILE)
        weight = weights[: z[own].shape[0], None]
        value[own] += _selected(weight, weight * b[row].float() * z[own])
    if h is not None:
        for item, tile, row, weights in _each(tables.blocks):
            own = slice(tile * TILE, (tile + 1) * TILE)
            weight = weights[: z[own].shape[0], None]
            parts = torch.split(b[row : row + BLOCK].float(), list(widths), dim=1)
            deltas = [own_h.float() @ part for own_h, part in zip(h[item], parts, strict=True)]
            value[own] += _selected(weight, torch.cat(deltas, dim=1)[: weight.shape[0]])
    for _, tile, row, weights in _each(tables.biases):
        own = slice(tile * TILE, (tile + 1) * TILE)
        weight = weights[: z[own].shape[0], None]
        value[own] += _selected(weight, weight * b[row].float())


def _each(items: Items) -> list[tuple[int, int, int, torch.Tensor]]:
    """Number, tile, first pool row and weights [TILE] of each item."""
    count = int(items.starts[-1])
    tiles, rows = items.tiles[:count].tolist(), items.rows[:count].tolist()
    return [(item, tiles[item], rows[item], items.weights[item]) for item in range(count)]


def _selected(weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return torch.where(weight != 0, delta, 0.0)
