"""What streaming clients cost the decode step: one batch of requests in process, and the same over
HTTP, each token of each request streamed to a client of its own.

  scripts/bench_server.py [--clients 256] [--tokens 48] [--rounds 3] [overrides of the engine]

A step is the time between two turns that gave tokens to all requests: in process by the engine's
events, over HTTP by the first client's. Both run in turn, so that the machine's speed moves both.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from tiny_server import ROOT, running_server

PROMPT = "The history of the sea begins with"
OFFLINE = "--offline"


def offline(clients: int, tokens: int, overrides: Sequence[str]) -> list[float]:
    """Seconds of each decode step in process."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from engine.cli.job import IDLE_THREADS_SLEEP
    from engine.cli.schema import register_schema

    os.environ.setdefault(*IDLE_THREADS_SLEEP)  # before torch is imported
    from engine import wiring

    register_schema()
    with initialize_config_module("engine.conf", version_base="1.3"):
        config = OmegaConf.to_object(compose("config", list(overrides)))
    engine = wiring.build(config).engine()  # type: ignore[arg-type]
    sampling = engine.sampling_params(max_tokens=tokens, ignore_eos=True)
    ids = [engine.add_request(f"{number}. {PROMPT}", sampling) for number in range(clients)]
    ends: list[float] = []

    def note(events: Sequence[object]) -> None:
        if len(events) == clients:
            ends.append(time.perf_counter())

    engine.run_to_end(ids, note)
    return steps_between(ends)


async def streamed(url: str, model: str, clients: int, tokens: int) -> list[float]:
    """Seconds between the first client's tokens, while all stream."""
    ends: list[float] = []

    async def one(number: int) -> None:
        host, port = urlsplit(url).hostname, urlsplit(url).port
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps(
            {
                "model": model,
                "prompt": f"{number}. {PROMPT}",
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        while b"[DONE]" not in (line := await reader.readline()):
            assert line, "the server closed a stream"
            if number == clients - 1 and line.startswith(b"data:"):
                ends.append(time.perf_counter())
        writer.close()

    await asyncio.gather(*(one(number) for number in range(clients)))
    return steps_between(ends)


def steps_between(ends: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(OFFLINE, action="store_true", help=argparse.SUPPRESS)
    args, more = parser.parse_known_args()
    clients, tokens = args.clients, args.tokens
    overrides = [
        f"scheduler.max_running_requests={clients}",
        f"scheduler.max_step_tokens={16 * clients}",
        "lora=default",
        *more,
    ]
    if args.offline:
        print(json.dumps(offline(clients, tokens, overrides)))
        return
    again = [sys.executable, __file__, OFFLINE, f"--clients={clients}", f"--tokens={tokens}", *more]
    both: dict[str, list[float]] = {"in process": [], "streamed": []}
    for _ in range(args.rounds):
        done = subprocess.run(again, cwd=ROOT, check=True, capture_output=True, text=True)
        both["in process"] += json.loads(done.stdout.splitlines()[-1])
        with running_server(*overrides, "server.served_model_name=base") as url:
            both["streamed"] += asyncio.run(streamed(url, "base", clients, tokens))
    print(f"{clients} requests, {tokens} tokens each, {args.rounds} rounds in turn")
    print(f"{'decode step, ms':<16} {'median':>8} {'mean':>8} {'p90':>8} {'steps':>6}")
    for name, steps in both.items():
        p90 = statistics.quantiles(steps, n=10)[-1]
        row = (statistics.median(steps), statistics.mean(steps), p90)
        print(f"{name:<16}", *(f"{1000 * value:>8.1f}" for value in row), f"{len(steps):>6}")
    ratio = statistics.median(both["streamed"]) / statistics.median(both["in process"])
    print(f"streamed / in process, medians: {ratio:.3f}")


if __name__ == "__main__":
    main()
