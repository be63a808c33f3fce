"""What the jobs of one command line came to: a row each, and the table that ends a `--multirun`.

Knows nothing of Hydra, nor how a job is run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.commands.result import JobResult


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job: its overrides and either its result or the reason why it has none."""

    overrides: Sequence[str]
    result: JobResult | None = None
    reason: str = ""

    @property
    def score(self) -> float:
        """Tokens per second, for Hydra's sweepers; NaN if there is none."""
        rate = self.result.tokens_per_second if self.result else None
        return math.nan if rate is None else rate


@dataclass(slots=True)
class Sweep:
    """The rows of all jobs so far, in the order in which they ran."""

    rows: list[JobRow] = field(default_factory=list)
    is_multirun: bool = False

    @property
    def num_failed(self) -> int:
        return sum(row.result is None for row in self.rows)

    def table(self) -> str:
        """One line per job: the overrides in which jobs differ, outcome, tokens/s, KV tokens."""
        shared = set.intersection(*(set(row.overrides) for row in self.rows))
        if len(self.rows) == 1:
            shared = set()
        cells = [("job", "overrides", "tokens/s", "KV tokens", "outcome")]
        for number, row in enumerate(self.rows):
            rate = row.result.tokens_per_second if row.result else None
            kv_tokens = row.result.kv_tokens if row.result else None
            cells.append(
                (
                    str(number),
                    " ".join(item for item in row.overrides if item not in shared),
                    "-" if rate is None else f"{rate:,.1f}",
                    "-" if kv_tokens is None else f"{kv_tokens:,}",
                    "ok" if row.result else f"failed: {row.reason}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            f"{job:>{widths[0]}}  {overrides:<{widths[1]}}  {rate:>{widths[2]}}  "
            f"{kv:>{widths[3]}}  {outcome}"
            for job, overrides, rate, kv, outcome in cells
        ]
        return "\n".join(lines)
