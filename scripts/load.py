"""Load on a running server: streamed completions over many adapters, in the open loop or with a
fixed number of clients, and what their users saw.

  scripts/load.py --url http://127.0.0.1:8000 --rate 20 --seconds 60 --goodput ttft:500 itl:100
  scripts/load.py --tiny 32 --concurrency 1000 --seconds 600 --disconnect 0.05 --churn 2 --check

--rate R: requests come by a Poisson process of R a second, whether earlier ones have ended or not;
their times count from when they were due. --concurrency N alone: N clients, each asking again when
it has its answer. Both: at most N at once, the others wait, and their wait counts.
--tiny N: start a server on the tiny llama of tests/data with N random adapters, and stop it after.
--check: each completed answer is compared with the same request alone, afterwards; where they
differ, the two likeliest tokens must have been within NEAR_TIE (counted), else it is a fault.
Popularity formulas are in load_workload.py, what is refused and what an error in the table is, in
docs/observability.md. Ends with status 1 after errors or faults.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from load_client import LoadClient, Target
from load_report import Outcome, Sample, summary, table
from load_workload import POPULARITIES, Ask, Lengths, Workload
from tiny_server import tiny_server

NEAR_TIE = 1e-3  # of the two likeliest tokens' log probabilities
SAMPLE_EVERY_S = 2.0
TINY_OVERRIDES = ("server.max_requests=4096", "log_level=warning")


@dataclass
class Run:
    """One load run: its clients, its schedule, what came of it."""

    client: LoadClient
    workload: Workload
    adapters: dict[str, str]
    options: argparse.Namespace
    outcomes: list[tuple[Ask, Outcome]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    stop_s: float = 0.0

    async def run(self) -> float:
        """All of it; the seconds from the first request to the last answer."""
        start = time.monotonic()
        self.stop_s = start + self.options.seconds
        background = [asyncio.create_task(task) for task in self._background()]
        await (self._open_loop() if self.options.rate else self._closed_loop())
        seconds = time.monotonic() - start
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        return seconds

    def _background(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._watch()
        if self.options.churn and self.adapters:
            yield self._churn()

    async def _closed_loop(self) -> None:
        async def ask_again() -> None:
            while time.monotonic() < self.stop_s:
                await self._ask(time.monotonic())

        await asyncio.gather(*(ask_again() for _ in range(self.options.concurrency)))

    async def _open_loop(self) -> None:
        places = asyncio.Semaphore(self.options.concurrency or sys.maxsize)
        due_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for gap in self.workload.gaps(self.options.rate):
                due_s += gap
                if due_s > self.stop_s:
                    return
                await asyncio.sleep(due_s - time.monotonic())
                group.create_task(self._ask(due_s, places))

    async def _ask(self, due_s: float, places: asyncio.Semaphore | None = None) -> None:
        ask = self.workload.next()
        leave_after = None
        if self.workload.happens(self.options.disconnect):
            leave_after = self.workload.between(0, ask.max_tokens - 1)
        async with places or contextlib.nullcontext():
            self.outcomes.append((ask, await self.client.stream(ask, due_s, leave_after)))

    async def _watch(self) -> None:
        while True:
            self.samples.append(await self.client.sample())
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _churn(self) -> None:
        """Unload and load adapters, one at a time, for ever; none is left unloaded."""
        for gap in self.workload.gaps(1 / self.options.churn):
            await asyncio.sleep(gap)
            reload = asyncio.create_task(self._reload())
            try:
                await asyncio.shield(reload)
            except asyncio.CancelledError:
                await reload  # the run ends; a change that has begun is made whole
                raise

    async def _reload(self) -> None:
        name = self.workload.one_of(sorted(self.adapters))
        try:
            await self.client.unload(name)
            self.changes["unloaded"] += 1
            await self.client.load(name, self.adapters[name])
            self.changes["loaded"] += 1
        except httpx.HTTPError as error:
            self.changes[f"error: {error}"] += 1


async def check(run: Run) -> dict[str, Any]:
    """Compare every completed answer with the same request alone."""
    alone: dict[Ask, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    faults = []
    for ask, outcome in run.outcomes:
        if outcome.kind != "completed":
            continue
        if ask not in alone:
            alone[ask] = await run.client.solo(ask)
        verdict = compare(outcome.text, alone[ask])
        counts[verdict] += 1
        if verdict == "different":
            faults.append(f"{ask}: {outcome.text!r}, alone {alone[ask]['text']!r}")
    return {"alone": len(alone), **counts, "faults": faults}


def compare(text: str, alone: dict[str, Any]) -> str:
    """ "equal", "near-tie" or "different"; `alone` is a choice with log probabilities."""
    if text == alone["text"]:
        return "equal"
    pairs = zip(text, alone["text"], strict=False)
    shorter = min(len(text), len(alone["text"]))
    place = next((i for i, (own, other) in enumerate(pairs) if own != other), shorter)
    offsets, tops = alone["logprobs"]["text_offset"], alone["logprobs"]["top_logprobs"]
    token = max(i for i, offset in enumerate(offsets) if offset <= place)
    gaps = [gap_of(top) for top in tops[max(0, token - 1) : token + 2]]
    return "near-tie" if min(gaps) < NEAR_TIE else "different"


def gap_of(top: dict[str, float]) -> float:
    """Between the two likeliest; 0 if they share a text, so that only one is told."""
    if len(top) < 2:
        return 0.0
    first, second, *_ = sorted(top.values(), reverse=True)
    return first - second


async def load(url: str, options: argparse.Namespace) -> int:
    """Run, report, return the exit status."""
    target = Target(url, options.api_key, options.admin_key)
    async with LoadClient(target) as client:
        base, adapters = await client.models()
        lengths = Lengths(tuple(options.prompt_words), tuple(options.output_tokens))
        workload = Workload(
            *(base, list(adapters), lengths),
            kind=options.popularity,
            exponent=options.exponent,
            base_share=options.base_share,
            num_prompts=options.num_prompts,
            seed=options.seed,
        )
        run = Run(client, workload, adapters, options)
        seconds = await run.run()
        outcomes = [outcome for _, outcome in run.outcomes]
        numbers = summary(outcomes, seconds, options.goodput, run.samples)
        numbers["adapter_changes"] = dict(run.changes)
        numbers["check"] = await check(run) if options.check else {}
        numbers["left"] = vars(await client.sample())
    show(numbers, outcomes)
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options), **numbers}, default=str))
    return int(failed(numbers))


def show(numbers: dict[str, Any], outcomes: list[Outcome]) -> None:
    print(table(numbers))
    print(f"adapter changes {numbers['adapter_changes']}")
    if numbers["check"]:
        print("against solo runs", {k: v for k, v in numbers["check"].items() if k != "faults"})
    for fault in numbers["check"].get("faults", [])[:5]:
        print("  ", fault)
    left = numbers["left"]
    print(f"left on the server: {left['num_running']} running, {left['num_waiting']} waiting")
    details = Counter((out.kind, out.detail) for out in outcomes if out.detail)
    for (kind, detail), count in details.most_common(8):
        print(f"  {count:,} x {kind}: {detail[:150]}")


def failed(numbers: dict[str, Any]) -> bool:
    errors = [kind for kind in numbers["kinds"] if kind.startswith("error")]
    errors += [change for change in numbers["adapter_changes"] if change.startswith("error")]
    left = numbers["left"]["num_running"] + numbers["left"]["num_waiting"]
    return bool(errors or left or numbers["check"].get("faults"))


def slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "itl", "e2e"):
        raise argparse.ArgumentTypeError(f"{text!r}: write ttft:, itl: or e2e: and milliseconds")
    return name, float(limit) / 1000


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url")
    where.add_argument("--tiny", type=int, metavar="ADAPTERS")
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--popularity", choices=POPULARITIES, default="zipf")
    parser.add_argument("--exponent", type=float, default=1.0, help="zipf's s, slora's a")
    parser.add_argument("--base-share", type=float, default=0.1)
    parser.add_argument("--prompt-words", type=int, nargs=2, default=[4, 32])
    parser.add_argument("--output-tokens", type=int, nargs=2, default=[8, 48])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--goodput", type=slo, nargs="+", default=[], metavar="SLO:MS")
    parser.add_argument("--disconnect", type=float, default=0.0, help="share of requests left")
    parser.add_argument("--churn", type=float, help="mean seconds between reloads of an adapter")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--admin-key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    if options.rate is None and options.concurrency is None:
        parser.error("give --rate, --concurrency or both")
    options.goodput = dict(options.goodput)
    return options


def main(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(tiny_server(options.tiny, *TINY_OVERRIDES))
        return asyncio.run(load(url, options))


if __name__ == "__main__":
    sys.exit(main(arguments()))
