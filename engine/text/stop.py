"""Stop strings over a stream of text pieces: emits what is certain, holds back what may be a stop's
beginning.

Knows nothing of tokens; where the pieces are cut makes no difference.
"""


class StopStrings:
    """Cuts a stream where the first of `stops` is complete, just before its text.

    If several are complete at the same character, the longest one is cut.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops`: non-empty texts; none lets everything through."""
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; text that is now certain, and whether a stop was found (then no more
        is emitted).
        """
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        starts = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if matches:
            _, start = min(matches)
            self._held, self._stopped = "", True
            return text[:start], True
        cut = len(text) - self._num_open(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The stream is over: what was held back."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
