"""Turns what a load run saw into numbers: percentiles, goodput, errors by kind, memory.

Knows nothing of HTTP. Seconds inside, milliseconds in print.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass
class Outcome:
    """One request as its client saw it. `start_s` is when it was due; `token_times_s` when each
    piece of text came. `kind`: "completed", "disconnected", or what refused or broke it.
    """

    start_s: float
    kind: str = ""
    detail: str = ""
    text: str = ""
    num_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def itl_s(self) -> float:
        """The request's mean gap; 0 for a single piece."""
        gaps = self.gaps_s
        return sum(gaps) / len(gaps) if gaps else 0.0

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Sample:
    """The server's numbers at one moment, from /metrics; memory of front end and engine process."""

    at_s: float
    front_rss_bytes: int
    engine_rss_bytes: int
    num_running: int
    num_waiting: int

    @property
    def rss_bytes(self) -> int:
        return self.front_rss_bytes + self.engine_rss_bytes


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all are not above (nearest rank)."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def meets(outcome: Outcome, slos_s: dict[str, float]) -> bool:
    """Completed, and each of ttft, itl (the request's mean) and e2e within its limit."""
    seen = {"ttft": outcome.ttft_s, "itl": outcome.itl_s, "e2e": outcome.e2e_s}
    return all(seen[name] <= limit for name, limit in slos_s.items())


def second_half(samples: Sequence[Sample]) -> dict[str, float]:
    """Memory over the run's second half, as fractions: how far the highest lies above the lowest,
    and the mean of the later part above that of the earlier (a leak).
    """
    half = [sample.rss_bytes for sample in samples[len(samples) // 2 :]]
    early, late = half[: len(half) // 2], half[len(half) // 2 :]
    if not early:
        return {}
    growth = (sum(late) / len(late)) / (sum(early) / len(early)) - 1
    return {"spread": max(half) / min(half) - 1, "growth": growth}


def summary(
    outcomes: Sequence[Outcome],
    seconds: float,
    slos_s: dict[str, float],
    samples: Sequence[Sample] = (),
) -> dict[str, Any]:
    """All numbers of a run, ready for JSON."""
    completed = [outcome for outcome in outcomes if outcome.kind == "completed"]
    timed = [outcome for outcome in completed if outcome.token_times_s]
    latencies = {
        "ttft": [outcome.ttft_s for outcome in timed],
        "itl": [gap for outcome in timed for gap in outcome.gaps_s],
        "e2e": [outcome.e2e_s for outcome in completed],
    }
    good = [outcome for outcome in timed if meets(outcome, slos_s)]
    num_tokens = sum(outcome.num_tokens for outcome in completed)
    rss = [sample.rss_bytes for sample in samples]
    return {
        "seconds": seconds,
        "requests": len(outcomes),
        "kinds": dict(Counter(outcome.kind for outcome in outcomes).most_common()),
        "completed_per_s": len(completed) / seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "slos_s": slos_s,
        "goodput_per_s": len(good) / seconds,
        "latency_s": {
            name: {f"p{p}": percentile(values, p) for p in PERCENTILES}
            for name, values in latencies.items()
        },
        "max_running": max((sample.num_running for sample in samples), default=0),
        "max_waiting": max((sample.num_waiting for sample in samples), default=0),
        "rss_bytes": {"first": rss[0], "max": max(rss), "last": rss[-1]} if rss else {},
        "rss_second_half": second_half(samples),
        "samples": [vars(sample) for sample in samples],
    }


def table(numbers: dict[str, Any]) -> str:
    """The summary for people."""
    lines = [
        f"{'requests':<24}{numbers['requests']:>10,} in {numbers['seconds']:.1f} s",
        f"{'completed / s':<24}{numbers['completed_per_s']:>10.2f}",
        f"{'output tokens / s':<24}{numbers['output_tokens_per_s']:>10.1f}",
    ]
    if numbers["slos_s"]:
        limits = ", ".join(f"{name} {1000 * s:g} ms" for name, s in numbers["slos_s"].items())
        lines.append(f"{'goodput / s':<24}{numbers['goodput_per_s']:>10.2f} ({limits})")
    lines.append(f"{'ms':<24}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES))
    for name, values in numbers["latency_s"].items():
        lines.append(f"  {name:<22}" + "".join(f"{1000 * s:>10.1f}" for s in values.values()))
    lines.append("outcomes")
    lines += [f"  {kind:<38}{count:>10,}" for kind, count in numbers["kinds"].items()]
    if numbers["rss_bytes"]:
        mib = {name: value / 2**20 for name, value in numbers["rss_bytes"].items()}
        later = numbers["rss_second_half"]
        lines.append(
            f"server RSS, MiB: first {mib['first']:.0f}, max {mib['max']:.0f}, last "
            f"{mib['last']:.0f}; second half: "
            + ", ".join(f"{name} {100 * value:+.1f}%" for name, value in later.items())
        )
        lines.append(f"at most {numbers['max_running']} running, {numbers['max_waiting']} waiting")
    return "\n".join(lines)
