"""Frames on the socket between the processes."""

import pytest

from engine.server.messages import AnyCommand, Submit
from engine.server.wire import FrameReader, frame


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_frames_arrive_whole_in_whatever_pieces(piece: int) -> None:
    sent = [Submit(key, list(range(key)), {"n": 2}, "a") for key in range(5)]
    data = b"".join(frame(command) for command in sent)
    reader: FrameReader[AnyCommand] = FrameReader(AnyCommand)
    found: list[AnyCommand] = []
    for start in range(0, len(data), piece):
        found += reader.feed(data[start : start + piece])
    assert found == sent and not reader._data
