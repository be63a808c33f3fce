"""How long a call takes on the device: median over replays of a CUDA graph of many calls, with what
it reads in the L2 cache and without. The CPU's clock stands in for tests.

Knows nothing of what is measured.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]
_REPLAYS = 21
# A replay should last so long that what starting it costs does not count.
_REPLAY_US, _MOST_CALLS, _MOST_COLD_CALLS = 2000.0, 500, 20
# Calls that take longer read so much that the cache does not count.
_LONG_US = 1000.0
_DEFAULT_L2_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: repeated as it is, and `cold`, with an L2 cache that holds nothing
    of it. `eager`: it could not be captured, launches count.
    """

    warm_us: float
    cold_us: float
    eager: bool = False


class Timer(Protocol):
    def __call__(self, call: Call) -> Timing: ...


class HostTimer:
    """One call by the CPU's clock."""

    def __call__(self, call: Call) -> Timing:
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        return Timing(seconds * 1e6, seconds * 1e6)


class CudaTimer:
    """Captures calls on the current device. They must work on the same tensors each time and make
    their own outputs.
    """

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or _DEFAULT_L2_BYTES
        # Read, not written: lines that must be written back would slow the next call down.
        self._buffer = torch.zeros(l2_bytes, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)

    def __call__(self, call: Call) -> Timing:
        for _ in range(3):  # compiles, chooses algorithms
            call()
        torch.cuda.synchronize()
        about_us = self._between_events(lambda: _repeat(call, 5)) / 5
        num_calls = _count(about_us, _MOST_CALLS)
        graph = _capture(lambda: _repeat(call, num_calls))
        if graph is None:
            eager_us = self._median_us(lambda: _repeat(call, num_calls)) / num_calls
            return Timing(eager_us, eager_us, eager=True)
        warm_us = self._median_us(graph.replay) / num_calls
        if _count(warm_us, _MOST_CALLS) > num_calls:  # launches had made it look longer
            num_calls = _count(warm_us, _MOST_CALLS)
            graph = _capture(lambda: _repeat(call, num_calls)) or graph
            warm_us = self._median_us(graph.replay) / num_calls
        if warm_us > _LONG_US:
            return Timing(warm_us, warm_us)
        cold_us = self._cold_us(call, _count(warm_us, _MOST_COLD_CALLS))
        return Timing(warm_us, warm_us if cold_us is None else cold_us)

    def _cold_us(self, call: Call, num_calls: int) -> float | None:
        """What calls add to flushes of the cache before each of them."""

        def flush_and_call() -> None:
            self._flush()
            call()

        both = _capture(lambda: _repeat(flush_and_call, num_calls))
        flushes = _capture(lambda: _repeat(self._flush, num_calls))
        if both is None or flushes is None:
            return None
        pairs = [
            self._between_events(both.replay) - self._between_events(flushes.replay)
            for _ in range(_REPLAYS)
        ]
        return statistics.median(pairs) / num_calls

    def _flush(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sum)

    def _median_us(self, work: Call) -> float:
        work()
        return statistics.median(self._between_events(work) for _ in range(_REPLAYS))

    def _between_events(self, work: Call) -> float:
        start, end = _event(), _event()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0


def make_timer(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _count(one_us: float, most: int) -> int:
    return max(1, min(most, int(_REPLAY_US / max(one_us, 0.1))))


def _repeat(call: Call, count: int) -> None:
    for _ in range(count):
        call()


def _capture(work: Call) -> torch.cuda.CUDAGraph | None:
    """None if the work cannot be captured, for it waits for the device or allocates on its own."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph
