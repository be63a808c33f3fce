"""LoRA deltas over the rank pool, in plain torch.

Shapes: T tokens, M members of a projection group (q, k, v), R rows of the pool, I in, O = sum of
the members' widths. An adapter owns one row range; a tile is a range of tokens with the pool rows
that cover their adapters, and a mask that is 0 where a row is not the token's own. Knows nothing of
who owns which rows.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LoRATile:
    """Tokens `start`..`stop` and pool rows `row_start`..`row_stop`; mask [tokens, rows] or None for
    all ones.
    """

    start: int
    stop: int
    row_start: int
    row_stop: int
    mask: torch.Tensor | None


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, ...],
    tiles: tuple[LoRATile, ...],
) -> None:
    """y [T, O] += mask(x [T, I] @ a [M, R, I].T) @ b [R, O], member by member, in place (scaling is
    folded into b).
    """
    for tile in tiles:
        x_tile = x[tile.start : tile.stop]
        y_tile = y[tile.start : tile.stop]
        b_tile = b[tile.row_start : tile.row_stop]
        column = 0
        for member, width in enumerate(widths):
            h = torch.mm(x_tile, a[member, tile.row_start : tile.row_stop].t())
            if tile.mask is not None:
                h.mul_(tile.mask)
            y_tile[:, column : column + width].addmm_(h, b_tile[:, column : column + width])
            column += width
