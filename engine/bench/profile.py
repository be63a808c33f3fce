"""Where a decode step's time goes: what the device does over some steps, by torch's profiler.

Idle time is what lies between the device's work; that around the start of a step on the host is
between steps. The profiler slows the host down: compare shares, take times from elsewhere.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine.bench.decode import Names, round_robin
from engine.bench.workload import random_prompts
from engine.serving.engine import Engine

_MARK = "bench step"
_COPIES = ("Memcpy", "Memset")
_LAUNCHES = ("LaunchKernel", "GraphLaunch")
_NUM_TOP, _MOST_FIRST_STEPS = 12, 10_000
_LONGEST_NAME = 70


@dataclass(frozen=True, slots=True)
class Span:
    """Something that the device did, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Of one step on average, in microseconds: its time, the device's work, its idle time and the
    part of that between steps; `top` holds (kernel, microseconds, calls).
    """

    step_us: float
    busy_us: float
    idle_us: float
    between_us: float
    num_kernels: float
    num_launches: float
    top: tuple[tuple[str, float, float], ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def analyse(spans: Sequence[Span], starts: Sequence[float], num_launches: int) -> StepProfile:
    """`starts`: when the host began each step, in order. Raises RuntimeError without any work."""
    if not spans:
        raise RuntimeError("the profiler saw no work of the device")
    ordered = sorted(spans, key=lambda span: span.start)
    idle = between = 0.0
    reached = ordered[0].start
    for span in ordered:
        if span.start > reached:
            idle += span.start - reached
            if any(reached <= start <= span.start for start in starts[1:]):
                between += span.start - reached
        reached = max(reached, span.end)
    steps, window = len(starts), reached - ordered[0].start
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in ordered:
        by_name[span.name].append(span.end - span.start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_NUM_TOP]
    num_kernels = sum(not span.name.startswith(_COPIES) for span in ordered)
    return StepProfile(
        step_us=window / steps,
        busy_us=(window - idle) / steps,
        idle_us=idle / steps,
        between_us=between / steps,
        num_kernels=num_kernels / steps,
        num_launches=num_launches / steps,
        top=tuple((name, sum(own) / steps, len(own) / steps) for name, own in longest),
    )


def profile_steps(
    engine: Engine, names: Names, *, batch: int, prompt: int, steps: int
) -> StepProfile:
    """Of `steps` steps of a batch, all of it decoding."""
    on_card = torch.cuda.is_available()
    sampling = engine.sampling_params(temperature=0.0, max_tokens=steps + 16, ignore_eos=True)
    prompts = random_prompts(batch, prompt, engine.model.spec.vocab_size)
    pairs = zip(prompts, round_robin(names, batch), strict=True)
    ids = [engine.add_request(own, sampling, name) for own, name in pairs]
    try:
        _reach_decoding(engine, batch)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if on_card else []
        with torch.profiler.profile(activities=kinds) as profiler:
            for _ in range(steps):
                with torch.profiler.record_function(_MARK):
                    engine.step()
            if on_card:
                torch.cuda.synchronize()
        events = list(profiler.events() or ())
    finally:
        for request_id in ids:
            engine.abort(request_id)
    return analyse(*_work_of(events, on_card))


def _reach_decoding(engine: Engine, batch: int) -> None:
    """Step until all prompts are done, and twice more."""
    num_whole = 0
    for _ in range(_MOST_FIRST_STEPS):
        num_whole += len(engine.step()) == batch
        if num_whole == 3:
            return
    raise RuntimeError(f"{batch} rows never decoded together")


def _work_of(events: Sequence[Any], on_card: bool) -> tuple[list[Span], list[float], int]:
    """The device's work, starts of steps on the host, and launches. Without a card the host's ops
    stand in.
    """
    spans, starts, num_launches = [], [], 0
    for event in events:
        is_on_card = event.device_type.name == "CUDA"
        parent = getattr(event, "cpu_parent", None)
        if event.name == _MARK:
            starts += [] if is_on_card else [float(event.time_range.start)]
        elif is_on_card or (not on_card and parent is not None and parent.name == _MARK):
            name = " ".join(event.name.split())[:_LONGEST_NAME]
            spans.append(Span(name, float(event.time_range.start), float(event.time_range.end)))
        else:
            num_launches += any(word in event.name for word in _LAUNCHES)
    return spans, sorted(starts), num_launches
