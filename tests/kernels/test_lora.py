"""LoRA over the rank pool against one token at a time, for random adapters, tokens and gaps."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.lora import (
    LooseRows,
    LoRAWork,
    SavedRows,
    VectorRows,
    add_embedding_lora,
    add_lora,
    bind_lora,
    saved_deltas,
)
from engine.lora.batch import MAX_PADDED_TOKENS, Segment, bind_runs

IN = 10
shapes = st.lists(
    st.tuples(
        st.integers(1, 2 * MAX_PADDED_TOKENS),
        st.sampled_from([8, 16, 24]),
        st.sampled_from([0, 8, 24, 40]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    num_base=st.integers(0, 3),
    scattered=st.booleans(),
    widths=st.sampled_from([(12, 4, 4), (6, 6), (9,)]),
)
def test_any_mix_equals_one_by_one(
    shape: list[tuple[int, int, int]],
    num_base: int,
    scattered: bool,
    widths: tuple[int, ...],
) -> None:
    num_tokens = num_base + sum(count for count, _, _ in shape)
    order = torch.randperm(num_tokens).tolist() if scattered else list(range(num_tokens))
    segments, taken, row = [], num_base, 0
    for count, rows, gap in shape:
        row += gap
        segments.append(Segment(tuple(order[taken : taken + count]), row, row + rows))
        taken, row = taken + count, row + rows
    token = num_tokens
    torch.manual_seed(token)
    a, b = torch.randn(row, len(widths), IN), torch.randn(row, sum(widths))
    x, y = torch.randn(token, IN), torch.randn(token, sum(widths))
    expected = y.double()
    for segment in segments:
        rows = slice(segment.row_start, segment.row_stop)
        for own in segment.tokens:
            column = 0
            for member, width in enumerate(widths):
                h = a[rows, member].double() @ x[own].double()
                delta = h @ b[rows, column : column + width].double()
                expected[own, column : column + width] += delta
                column += width
    untouched = y[order[:num_base]].clone()
    work = LoRAWork(bind_runs(segments, torch.device("cpu")))
    add_lora(x, y, bind_lora(a, b, widths, None, work))
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(y[order[:num_base]], untouched)


def test_idle_rows_between_adapters_disturb_nobody() -> None:
    """Rows that no token owns may hold anything, even infinities."""
    a, b = torch.full((24, 1, IN), torch.inf), torch.full((24, 4), torch.nan)
    a[:8], b[:8], a[16:], b[16:] = 1.0, 1.0, 2.0, 1.0
    runs = bind_runs([Segment((0, 1), 0, 8), Segment((2, 3), 16, 24)], torch.device("cpu"))
    assert len(runs) == 1, "the gap is computed through"
    x, y = torch.ones(4, IN), torch.zeros(4, 4)
    add_lora(x, y, bind_lora(a, b, (4,), None, LoRAWork(runs)))
    assert y.tolist() == [[80.0] * 4] * 2 + [[160.0] * 4] * 2


def vectors(tokens: list[int], rows: list[int], weights: list[float] | None) -> VectorRows:
    own = None if weights is None else torch.tensor(weights).unsqueeze(-1)
    return VectorRows(torch.tensor(tokens), torch.tensor(rows), own)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), biased=st.booleans(), weighted=st.booleans())
def test_weights_gains_and_biases_equal_one_token_at_a_time(
    seed: int, biased: bool, weighted: bool
) -> None:
    """Tokens with several adapters, each with gain and bias rows, beside tokens of a run."""
    generator = torch.Generator().manual_seed(seed)
    widths, num_tokens, rank = (5, 3), 6, 4
    a, b = (torch.randn(32, *s, generator=generator) for s in ((2, IN), (8,)))
    for start in (8, 16, 24):
        a[start + rank :][:2] = 0
    bias = torch.randn(8, generator=generator) if biased else None
    x, y = torch.randn(num_tokens, IN), torch.randn(num_tokens, 8)
    weight = 0.3 if weighted else 1.0
    own = [(1, 8), (1, 16), (4, 24), (5, 8)]
    expected = y.double()
    for token, start in [(2, 0), *own]:
        rows, w = slice(start, start + rank), 1.0 if start == 0 else weight
        delta = torch.cat(
            [a[rows, m].double() @ x[token].double() @ part.double()
             for m, part in enumerate(b[rows].split(widths, -1))]
        )  # fmt: skip
        if start:
            plain = y[token] - (0 if bias is None else bias)
            delta += b[start + rank].double() + plain.double() * b[start + rank + 1].double()
        expected[token] += w * delta
    tokens, starts = [token for token, _ in own], [start for _, start in own]
    weights = [weight] * len(own) if weighted else None
    each = torch.full((1, 1), weight) if weighted else None
    work = LoRAWork(
        bind_runs([Segment((2,), 0, rank)], torch.device("cpu")),
        tuple(LooseRows(s, s + rank, torch.tensor([t]), each) for t, s in own),
        vectors(tokens, [start + rank + 1 for start in starts], weights),
        vectors(tokens, [start + rank for start in starts], weights),
    )
    before = y.clone()
    add_lora(x, y, bind_lora(a, b, widths, bias, work))
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(y[[0, 3]], before[[0, 3]])


def test_an_embedding_is_a_product_with_unit_vectors() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 20), torch.randn(16, 6)
    ids, y = torch.tensor([3, 19, 3, 0]), torch.randn(4, 6)
    tokens = torch.tensor([0, 2, 3])
    gains = vectors([0, 2, 3], [12, 12, 12], None)
    work = LoRAWork(loose=(LooseRows(8, 12, tokens, None),), gains=gains)
    expected = y.clone()
    expected[tokens] += F.one_hot(ids[tokens], 20).float() @ a[8:12].t() @ b[8:12]
    expected[tokens] += y[tokens] * b[12]
    add_embedding_lora(ids, y, a, b, work)
    torch.testing.assert_close(y, expected)


def test_saved_matrices_replace_the_output_by_their_weight() -> None:
    torch.manual_seed(0)
    matrices, x, y = torch.randn(2, 20, IN), torch.randn(3, IN), torch.randn(3, 20)
    rows = (
        SavedRows(0, torch.tensor([0, 2]), None),
        SavedRows(1, torch.tensor([1]), torch.tensor([[0.25]])),
    )
    first, second = saved_deltas(x, y, matrices, LoRAWork(saved=rows))
    torch.testing.assert_close(y[[0, 2]] + first, x[[0, 2]] @ matrices[0].t())
    torch.testing.assert_close(y[[1]] + second, 0.75 * y[[1]] + 0.25 * x[[1]] @ matrices[1].t())
    ids, hidden = torch.tensor([4, 0, 19]), torch.randn(3, IN)
    (first, _) = saved_deltas(ids, hidden, matrices, LoRAWork(saved=rows))
    torch.testing.assert_close(hidden[[0, 2]] + first, matrices[0][[4, 19]])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bits_do_not_depend_on_who_else_is_in_the_run(data: st.DataObject) -> None:
    """An adapter's deltas alone and beside others, at whatever tokens, are the same bits."""
    count = data.draw(st.integers(1, 20))
    rank = data.draw(st.sampled_from([8, 16]))
    others = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20)), max_size=3))
    torch.manual_seed(count)
    a, b = torch.randn(11 * rank, 2, 64), torch.randn(11 * rank, 96)
    num_tokens = count + sum(number for _, number in others)
    places = torch.randperm(num_tokens).tolist()
    own_x, own_y = torch.randn(count, 64), torch.randn(count, 96)
    x, y = torch.randn(num_tokens, 64), torch.randn(num_tokens, 96)
    x[places[:count]], y[places[:count]] = own_x, own_y
    segments, taken, row = [Segment(tuple(places[:count]), 0, rank)], count, rank
    for gap, number in others:
        row += (gap - 1) * rank
        segments.append(Segment(tuple(places[taken : taken + number]), row, row + rank))
        taken, row = taken + number, row + rank
    alone = bind_runs([Segment(tuple(range(count)), 0, rank)], torch.device("cpu"))
    together = bind_runs(segments, torch.device("cpu"))
    add_lora(own_x, own_y, bind_lora(a, b, (64, 32), None, LoRAWork(alone)))
    add_lora(x, y, bind_lora(a, b, (64, 32), None, LoRAWork(together)))
    assert torch.equal(y[places[:count]], own_y)
