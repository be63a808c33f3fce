"""LoRA deltas over the rank pool, in plain torch.

Shapes: T tokens, R rows of the pool, M members of a projection group (q, k, v), I in, O = sum of
the members' widths. An adapter owns one range of rows, made of blocks of BLOCK_ROWS. Many tokens of
one adapter (a prompt) are a span: two matrix products a member. Few tokens each of several adapters
(decoding) are blocks: neighbouring rank blocks, each with its own tokens, in batched products, so
that the number of calls does not grow with the number of adapters. Knows nothing of who owns rows.
"""

from dataclasses import dataclass

import torch

BLOCK_ROWS = 8


@dataclass(frozen=True, slots=True)
class LoRASpan:
    """Tokens `start`..`stop` all use pool rows `row_start`..`row_stop`."""

    start: int
    stop: int
    row_start: int
    row_stop: int


@dataclass(frozen=True, slots=True)
class LoRABlocks:
    """Blocks `row_start`..`row_stop` of the pool, each for `width` tokens.

    `tokens` int64 [blocks * width] are the step's tokens block by block, padded with any token;
    `real` int64 [n] are the places in `tokens` that are no padding (None: all of them) and
    `targets` int64 [n] the tokens there. A token of an adapter with several blocks occurs in each.
    """

    row_start: int
    row_stop: int
    width: int
    tokens: torch.Tensor
    real: torch.Tensor | None
    targets: torch.Tensor


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, ...],
    spans: tuple[LoRASpan, ...],
    blocks: tuple[LoRABlocks, ...],
) -> None:
    """y [T, O] += (x [T, I] @ a [R, M, I].T) @ b [R, O] of each token's own rows, member by member.

    In place. b holds rank by output and has the scaling folded in.
    """
    for span in spans:
        _add_span(x, y, a, b, widths, span)
    for group in blocks:
        _add_blocks(x, y, a, b, widths, group)


def _add_span(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, ...],
    span: LoRASpan,
) -> None:
    own_a = a[span.row_start : span.row_stop]
    own_b = b[span.row_start : span.row_stop]
    own_y = y[span.start : span.stop]
    num_rows, members, width_in = own_a.shape
    h = torch.mm(own_a.view(-1, width_in), x[span.start : span.stop].t())
    h = h.view(num_rows, members, -1)
    column = 0
    for member, width in enumerate(widths):
        columns = slice(column, column + width)
        own_y[:, columns].addmm_(h[:, member].t(), own_b[:, columns])
        column += width


def _add_blocks(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, ...],
    group: LoRABlocks,
) -> None:
    members, width_in = a.shape[1:]
    own_a = a[group.row_start : group.row_stop].view(-1, BLOCK_ROWS * members, width_in)
    own_b = b[group.row_start : group.row_stop].view(-1, BLOCK_ROWS, b.shape[1])
    own_x = x.index_select(0, group.tokens).view(-1, group.width, width_in)
    h = torch.bmm(own_a, own_x.transpose(1, 2)).view(-1, BLOCK_ROWS, members, group.width)
    if members == 1:
        delta = torch.bmm(h[:, :, 0].transpose(1, 2), own_b)
    else:
        delta = x.new_empty((own_a.shape[0], group.width, b.shape[1]))
        column = 0
        for member, width in enumerate(widths):
            columns = slice(column, column + width)
            delta[:, :, columns] = torch.bmm(h[:, :, member].transpose(1, 2), own_b[:, :, columns])
            column += width
    delta = delta.view(-1, b.shape[1])
    if group.real is not None:
        delta = delta.index_select(0, group.real)
    y.index_add_(0, group.targets, delta)
