"""Stop strings over any cutting into pieces, against the definition on the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop import StopStrings

small = st.text(alphabet="ab", max_size=30)


def expected(
    pieces: list[tuple[str, bool]], stops: tuple[str, ...], *, include: bool
) -> tuple[str, bool]:
    """Cut at the first match to be complete in a piece that may stop, the longest of those that end
    together: before or after it.
    """
    text = "".join(piece for piece, _ in pieces)
    may_stop = [flag for piece, flag in pieces for _ in piece]
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if may_stop[end - 1] and text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.tuples(small, st.booleans()), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_equals_the_definition(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    own = StopStrings(tuple(stops), include=include)
    emitted, stopped = "", False
    whole = "".join(piece for piece, _ in pieces)
    for piece, may_stop in pieces:
        text, stopped = own.push(piece, may_stop=may_stop)
        emitted += text
        assert whole.startswith(emitted), "nothing is taken back"
        if stopped:
            break
    if not stopped:
        emitted += own.flush()
    assert (emitted, stopped) == expected(pieces, tuple(stops), include=include)


def test_what_cannot_be_a_stop_is_emitted_at_once() -> None:
    own = StopStrings(("###",))
    assert own.push("hello") == ("hello", False)
    assert own.push(" #") == (" ", False)
    assert own.push("x") == ("#x", False)
    assert own.push("##") == ("", False)
    assert own.push("#tail") == ("", True)
    assert own.push("more") == ("", True)
