"""LoRA deltas over the rank pool, in plain torch.

Shapes: T tokens, R rows of the pool, M members of a projection group (q, k, v), I in, O = sum of
the members' widths. An adapter owns one range of rows. Neighbours of equal rank and about as many
tokens are computed together as a run, in batched products, so that the number of calls does not
grow with the number of adapters; tokens with weighted or several adapters are computed adapter by
adapter. Knows nothing of who owns which rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class LoRARun:
    """Adapters of `rank` rows each, at pool rows `row_start`..`row_stop`, `width` tokens for each.

    `tokens` int64 [adapters * width] are the step's tokens adapter by adapter, padded with any
    token. `own` int64 [n] are those that are not padding and `places` says where in `tokens` they
    are (None: nothing is padded, own is tokens). `span` is set if they are neighbours in order.
    """

    row_start: int
    row_stop: int
    rank: int
    width: int
    tokens: torch.Tensor
    own: torch.Tensor
    places: torch.Tensor | None
    span: slice | None


@dataclass(frozen=True, slots=True)
class LooseRows:
    """One adapter's tokens, anywhere: `tokens` int64 [n], `weights` [n, 1] (None: all 1)."""

    row_start: int
    row_stop: int
    tokens: torch.Tensor
    weights: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class VectorRows:
    """Single rows of b as vectors: row `rows[i]` for token `tokens[i]`, both int64 [n], times
    `weights` [n, 1] (None: all 1). A token may come several times.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Tokens whose output comes from whole matrix `index` in place of the base's, `tokens` and
    `weights` as above: y + weight * (y' - y).
    """

    index: int
    tokens: torch.Tensor
    weights: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LoRAWork:
    """What a step asks of each layer. `gains` rows hold gain - 1, `biases` rows biases; `saved` is
    the embedding's or the head's.
    """

    runs: tuple[LoRARun, ...] = ()
    loose: tuple[LooseRows, ...] = ()
    gains: VectorRows | None = None
    biases: VectorRows | None = None
    saved: tuple[SavedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class BoundRun:
    """A run with its parts of one layer's pool.

    `a` [adapters, rank * M, I]; `b`, a member each, [adapters, rank, width of the member].
    """

    run: LoRARun
    a: torch.Tensor
    b: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class BoundWork:
    """A step's work with one layer's pool; `base_bias` [O] is part of y before the deltas."""

    work: LoRAWork
    runs: tuple[BoundRun, ...]
    a: torch.Tensor
    b: torch.Tensor
    widths: tuple[int, ...]
    base_bias: torch.Tensor | None


def bind_lora(
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, ...],
    base_bias: torch.Tensor | None,
    work: LoRAWork,
) -> BoundWork:
    """Views of a [R, M, I] and b [R, O] (rank by output, scaling folded in) for `work`.

    Decoding binds once and adds many times: views cost as much as small products.
    """
    members, width_in = a.shape[1:]
    bound = []
    for run in work.runs:
        own_a = a[run.row_start : run.row_stop].view(-1, run.rank * members, width_in)
        own_b = b[run.row_start : run.row_stop].view(-1, run.rank, b.shape[1])
        bound.append(BoundRun(run, own_a, torch.split(own_b, list(widths), dim=-1)))
    return BoundWork(work, tuple(bound), a, b, widths, base_bias)


def add_lora(x: torch.Tensor, y: torch.Tensor, bound: BoundWork) -> None:
    """y [T, O] of the base becomes, in place, what each token's own adapters make of it.

    First y += gain * (y - base bias), then += (x [T, I] @ a.T) @ b member by member, then biases.
    """
    work = bound.work
    if work.gains is not None:
        _add_gains(y, bound.b, work.gains, bound.base_bias)
    for part in bound.runs:
        _add_run(x, y, part)
    for rows in work.loose:
        _add_loose(x, y, bound, rows)
    if work.biases is not None:
        _add_biases(y, bound.b, work.biases)


def saved_deltas(
    x: torch.Tensor, y: torch.Tensor, matrices: torch.Tensor, work: LoRAWork
) -> list[torch.Tensor]:
    """What `work.saved` adds to y [T, O], one [n, O] each, before other deltas change y.

    matrices [S, vocab, hidden]; x is token ids [T] (embedding) or hidden states [T, hidden] (head).
    """
    deltas = []
    for rows in work.saved:
        own_x = x.index_select(0, rows.tokens)
        lookup = F.linear if x.dim() == 2 else F.embedding
        delta = lookup(own_x, matrices[rows.index]) - y.index_select(0, rows.tokens)
        deltas.append(_weighted(delta, rows.weights))
    return deltas


def add_embedding_lora(
    token_ids: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, work: LoRAWork
) -> None:
    """As `add_lora` for an embedding: x is the unit vector of each of token_ids [T].

    a [R, vocab], b [R, hidden]; all adapters come as loose rows.
    """
    assert not work.runs and work.biases is None
    if work.gains is not None:
        _add_gains(y, b, work.gains, None)
    for rows in work.loose:
        own = slice(rows.row_start, rows.row_stop)
        h = a[own].index_select(1, token_ids.index_select(0, rows.tokens)).t()
        delta = h @ b[own]
        y.index_add_(0, rows.tokens, _weighted(delta, rows.weights))


def _add_run(x: torch.Tensor, y: torch.Tensor, part: BoundRun) -> None:
    """Each adapter's products have the shape that its own tokens give them, so that their bits do
    not depend on the other adapters of the run.
    """
    run = part.run
    own_x = x.index_select(0, run.tokens) if run.span is None else x[run.span]
    own_x, a = own_x.view(-1, run.width, x.shape[1]), part.a
    alone = own_x.shape[:2] == (1, 1)
    if alone:  # a batch of one product of one vector would go another way
        own_x, a = own_x.expand(2, -1, -1), a.expand(2, -1, -1)
    h = torch.bmm(a, own_x.transpose(1, 2))
    if alone:
        h = h[:1]
    shrunk = h.view(-1, run.rank, len(part.b), run.width).permute(2, 0, 3, 1).unbind()
    deltas = [torch.bmm(member_h, b) for member_h, b in zip(shrunk, part.b, strict=True)]
    delta = (deltas[0] if len(deltas) == 1 else torch.cat(deltas, -1)).flatten(0, 1)
    if run.places is not None:
        delta = delta.index_select(0, run.places)
    if run.span is None:
        y.index_add_(0, run.own, delta)
    else:
        y[run.span].add_(delta)


def _add_loose(x: torch.Tensor, y: torch.Tensor, bound: BoundWork, rows: LooseRows) -> None:
    own = slice(rows.row_start, rows.row_stop)
    own_x = x.index_select(0, rows.tokens)
    parts = [
        (own_x @ a.t()) @ b
        for a, b in zip(
            bound.a[own].unbind(1), torch.split(bound.b[own], list(bound.widths), -1), strict=True
        )
    ]
    delta = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    y.index_add_(0, rows.tokens, _weighted(delta, rows.weights))


def _add_gains(
    y: torch.Tensor, b: torch.Tensor, gains: VectorRows, base_bias: torch.Tensor | None
) -> None:
    own_y = y.index_select(0, gains.tokens)
    if base_bias is not None:
        own_y -= base_bias
    delta = own_y.mul_(b.index_select(0, gains.rows))
    y.index_add_(0, gains.tokens, _weighted(delta, gains.weights))


def _add_biases(y: torch.Tensor, b: torch.Tensor, biases: VectorRows) -> None:
    delta = b.index_select(0, biases.rows)
    y.index_add_(0, biases.tokens, _weighted(delta, biases.weights))


def _weighted(delta: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return delta if weights is None else delta * weights
