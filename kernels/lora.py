"""LoRA deltas over the rank pool, in plain torch.

Shapes: T tokens, R rows of the pool, M members of a projection group (q, k, v), I in, O = sum of
the members' widths. An adapter owns one range of rows. Neighbours of equal rank are computed
together as a run, in batched products, so that the number of calls does not grow with the number of
adapters. Knows nothing of who owns which rows.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LoRARun:
    """Adapters of `rank` rows each, at pool rows `row_start`..`row_stop`; tokens `start`..`stop`.

    Each adapter computes `width` tokens. If all have so many, `tokens` and `places` are None.
    Else `tokens` int64 [adapters * width] are the step's tokens adapter by adapter, padded with any
    token, and `places` int64 [stop - start] says where in `tokens` each of the run's tokens is.
    """

    start: int
    stop: int
    row_start: int
    row_stop: int
    rank: int
    width: int
    tokens: torch.Tensor | None
    places: torch.Tensor | None


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, ...],
    runs: tuple[LoRARun, ...],
) -> None:
    """y [T, O] += (x [T, I] @ a [R, M, I].T) @ b [R, O] of each token's own rows, member by member.

    In place. b holds rank by output and has the scaling folded in.
    """
    members, width_in = a.shape[1:]
    for run in runs:
        own_a = a[run.row_start : run.row_stop].view(-1, run.rank * members, width_in)
        own_b = b[run.row_start : run.row_stop].view(-1, run.rank, b.shape[1])
        own_x = x[run.start : run.stop] if run.tokens is None else x.index_select(0, run.tokens)
        own_x = own_x.view(-1, run.width, width_in)
        h = torch.bmm(own_a, own_x.transpose(1, 2)).view(-1, run.rank, members, run.width)
        own_y = y[run.start : run.stop]
        if members == 1 and run.places is None:
            own_y.view(-1, run.width, b.shape[1]).baddbmm_(h[:, :, 0].transpose(1, 2), own_b)
            continue
        column = 0
        for member, width in enumerate(widths):
            columns = slice(column, column + width)
            delta = torch.bmm(h[:, :, member].transpose(1, 2), own_b[:, :, columns]).flatten(0, 1)
            if run.places is not None:
                delta = delta.index_select(0, run.places)
            own_y[:, columns].add_(delta)
            column += width
