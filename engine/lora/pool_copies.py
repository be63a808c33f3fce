"""Copies into the rank pool beside running steps: on a card on a stream of their own, which steps
do not wait for. Knows nothing of what is copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.device import Device


class Arrival:
    """When copies are done: at once in host memory, else when `event` has passed."""

    def __init__(self, event: Any = None) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        return self._event is None or bool(self._event.query())


class PoolCopies:
    """Copies between `begin` and `end` belong together."""

    def __init__(self, device: Device) -> None:
        self._stream: Any = None
        if not device.host_visible and not device.dry:
            self._stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]

    @contextmanager
    def begin(self) -> Iterator[None]:
        """What is copied inside comes after all steps that have been started."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def end(self) -> Arrival:
        """Of all that was copied so far."""
        return Arrival(None if self._stream is None else self._stream.record_event())
