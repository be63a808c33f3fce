"""LoRA over the rank pool against one token at a time, for random adapters, tokens and gaps."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.lora import LoRAWork, add_lora, bind_lora
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
@given(shape=shapes, num_base=st.integers(0, 3), widths=st.sampled_from([(12, 4, 4), (6, 6), (9,)]))
def test_any_mix_equals_one_by_one(
    shape: list[tuple[int, int, int]], num_base: int, widths: tuple[int, ...]
) -> None:
    segments, token, row = [], num_base, 0
    for count, rows, gap in shape:
        row += gap
        segments.append(Segment(token, token + count, row, row + rows))
        token, row = token + count, row + rows
    torch.manual_seed(token)
    a, b = torch.randn(row, len(widths), IN), torch.randn(row, sum(widths))
    x, y = torch.randn(token, IN), torch.randn(token, sum(widths))
    expected = y.double()
    for segment in segments:
        rows = slice(segment.row_start, segment.row_stop)
        for own in range(segment.start, segment.stop):
            column = 0
            for member, width in enumerate(widths):
                h = a[rows, member].double() @ x[own].double()
                delta = h @ b[rows, column : column + width].double()
                expected[own, column : column + width] += delta
                column += width
    untouched = y[:num_base].clone()
    work = LoRAWork(bind_runs(segments, torch.device("cpu")))
    add_lora(x, y, bind_lora(a, b, widths, None, work))
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(y[:num_base], untouched)


def test_idle_rows_between_adapters_disturb_nobody() -> None:
    """Rows that no token owns may hold anything, even infinities."""
    a, b = torch.full((24, 1, IN), torch.inf), torch.full((24, 4), torch.nan)
    a[:8], b[:8], a[16:], b[16:] = 1.0, 1.0, 2.0, 1.0
    runs = bind_runs([Segment(0, 2, 0, 8), Segment(2, 3, 16, 24)], torch.device("cpu"))
    assert len(runs) == 1, "the gap is computed through"
    x, y = torch.ones(3, IN), torch.zeros(3, 4)
    add_lora(x, y, bind_lora(a, b, (4,), None, LoRAWork(runs)))
    assert y.tolist() == [[80.0] * 4] * 2 + [[160.0] * 4]
