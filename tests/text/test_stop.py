"""Stop strings over any cutting into pieces, against the definition on the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop import StopStrings

small = st.text(alphabet="ab", max_size=30)


def expected(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Cut where the first match to be complete begins; the longest of those that end together."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(small, max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
)
def test_equals_the_definition(pieces: list[str], stops: list[str]) -> None:
    own = StopStrings(tuple(stops))
    emitted, stopped = "", False
    for piece in pieces:
        text, stopped = own.push(piece)
        emitted += text
        whole = "".join(pieces)
        assert whole.startswith(emitted), "nothing is taken back"
        if stopped:
            break
    if not stopped:
        emitted += own.flush()
    assert (emitted, stopped) == expected("".join(pieces), tuple(stops))


def test_what_cannot_be_a_stop_is_emitted_at_once() -> None:
    own = StopStrings(("###",))
    assert own.push("hello") == ("hello", False)
    assert own.push(" #") == (" ", False)
    assert own.push("x") == ("#x", False)
    assert own.push("##") == ("", False)
    assert own.push("#tail") == ("", True)
    assert own.push("more") == ("", True)
