"""Frames on the socket between front end and engine process: four bytes of length, big-endian, and
a message in MessagePack.

Knows the messages' encoding, not their meaning.
"""

import struct
from typing import Any, Generic, TypeVar

import msgspec

HEADER = struct.Struct("!I")

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytearray:
    """A message as it goes over the socket."""
    data = bytearray(HEADER.size)
    _encoder.encode_into(message, data, HEADER.size)
    HEADER.pack_into(data, 0, len(data) - HEADER.size)
    return data


class FrameReader(Generic[_Message]):
    """Takes bytes as they arrive, in any pieces, and gives the messages that are complete."""

    def __init__(self, kind: Any) -> None:
        """`kind`: the type or union of the messages."""
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(kind)
        self._data = bytearray()

    def feed(self, data: bytes) -> list[_Message]:
        self._data += data
        messages, start = [], 0
        while len(self._data) >= (body := start + HEADER.size):
            end = body + HEADER.unpack_from(self._data, start)[0]
            if end > len(self._data):
                break
            with memoryview(self._data)[body:end] as view:
                messages.append(self._decoder.decode(view))
            start = end
        del self._data[:start]
        return messages
