"""Stop strings over a stream of text pieces: emits what is certain, holds back what may be a stop's
beginning.

Knows nothing of tokens; where the pieces are cut makes no difference, except that a piece may be
declared too early to end the stream.
"""


class StopStrings:
    """Cuts a stream where the first of `stops` is complete: just before its text, or after it if
    that is to be included.

    If several are complete at the same character, the longest one is cut.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """`stops`: non-empty texts; none lets everything through."""
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Take the next piece; text that is now certain, and whether a stop was found (then no more
        is emitted). A stop whose last character is in a piece that may not stop is mere text.
        """
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        num_held = len(self._held)
        text = self._held + text
        if may_stop and (found := self._first(text, num_held)):
            end, start = found
            self._held, self._stopped = "", True
            return text[: end if self._include else start], True
        cut = len(text) - self._num_open(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The stream is over: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, num_held: int) -> tuple[int, int] | None:
        """End and start of the first stop that ends behind the `num_held` characters held back."""
        starts = [(text.find(stop, max(0, num_held - len(stop) + 1)), stop) for stop in self._stops]
        return min(
            ((start + len(stop), start) for start, stop in starts if start >= 0), default=None
        )

    def _num_open(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
