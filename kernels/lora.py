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


@dataclass(frozen=True, slots=True)
class BoundRun:
    """A run with its parts of one layer's pool.

    `a` [adapters, rank * M, I]; `b`, a member each, [adapters, rank, width of the member].
    """

    run: LoRARun
    a: torch.Tensor
    b: tuple[torch.Tensor, ...]


def bind_lora(
    a: torch.Tensor, b: torch.Tensor, widths: tuple[int, ...], runs: tuple[LoRARun, ...]
) -> tuple[BoundRun, ...]:
    """Views of a [R, M, I] and b [R, O] (rank by output, scaling folded in) for `runs`.

    Decoding binds once and adds many times: views cost as much as small products.
    """
    members, width_in = a.shape[1:]
    bound = []
    for run in runs:
        own_a = a[run.row_start : run.row_stop].view(-1, run.rank * members, width_in)
        own_b = b[run.row_start : run.row_stop].view(-1, run.rank, b.shape[1])
        bound.append(BoundRun(run, own_a, torch.split(own_b, list(widths), dim=-1)))
    return tuple(bound)


def add_lora(x: torch.Tensor, y: torch.Tensor, bound: tuple[BoundRun, ...]) -> None:
    """y [T, O] += (x [T, I] @ a.T) @ b of each token's own rows, member by member, in place."""
    for part in bound:
        run = part.run
        own_x = x[run.start : run.stop] if run.tokens is None else x.index_select(0, run.tokens)
        own_x = own_x.view(-1, run.width, x.shape[1])
        h = torch.bmm(part.a, own_x.transpose(1, 2))
        own_y = y[run.start : run.stop]
        if len(part.b) == 1 and run.places is None:
            own_y.view(-1, run.width, y.shape[1]).baddbmm_(h.transpose(1, 2), part.b[0])
            continue
        shrunk = h.view(-1, run.rank, len(part.b), run.width).permute(2, 0, 3, 1).unbind()
        column = 0
        for member_h, member_b in zip(shrunk, part.b, strict=True):
            delta = torch.bmm(member_h, member_b).flatten(0, 1)
            if run.places is not None:
                delta = delta.index_select(0, run.places)
            own_y[:, column : column + member_b.shape[2]].add_(delta)
            column += member_b.shape[2]
