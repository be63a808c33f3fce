"""Malformed HTTP requests against a server: none may cause a 5xx but 503, none may hang, and a
valid request must be answered right afterwards.

  scripts/fuzz_server.py                          # a server on the tiny llama of tests/data
  scripts/fuzz_server.py --url http://127.0.0.1:8000 --count 1000

Requests come from a generator of raw bytes (fuzz_requests.py) over plain sockets and, with the
extra `fuzz`, from schemathesis, which reads the server's /openapi.json: their answers must be
documented there, too. A framing so wrong that the server just closes the connection is fine.
Ends with status 1 if anything is not as it should be.
"""

import argparse
import re
import socket
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from fuzz_requests import Case, Generator
from tiny_server import tiny_server

TIMEOUT_S = 60.0
AT_ONCE = 8
PROBE_EVERY = 16
TINY_OVERRIDES = ("model.max_model_len=64", "server.max_n=4", "sampling.max_tokens=4")
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
CLOSED, HUNG = "closed", "hung"


@dataclass
class Fuzz:
    """One run: how each kind of request was answered, and what was wrong."""

    url: str
    answers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    faults: list[str] = field(default_factory=list)
    num_probes: int = 0

    def __post_init__(self) -> None:
        self.model = httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]
        self.expected = self._probe()

    def raw(self, count: int, seed: int) -> None:
        """Cases of our own generator, some at once."""
        generator = Generator(self.model, seed)
        cases = (generator.next() for _ in range(count))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while batch := list(islice(cases, PROBE_EVERY)):
                for case, statuses in zip(batch, pool.map(self._send, batch), strict=True):
                    self._take(case, statuses)
                self.probe(batch[-1].kind)

    def probe(self, after: str) -> None:
        """A valid request is answered, and as it was at first."""
        self.num_probes += 1
        try:
            found = self._probe()
        except httpx.HTTPError as error:
            self.faults.append(f"a valid request after {after!r}: {error!r}")
            return
        if found != self.expected:
            self.faults.append(f"a valid request after {after!r}: {found}, not {self.expected}")

    def documented(self, count: int) -> int:
        """About `count` cases made from the server's own OpenAPI document; how many there were."""
        from fuzz_documented import send_documented

        num_cases = 0

        def take(label: str, status: str, fault: str) -> None:
            nonlocal num_cases
            num_cases += 1
            self.answers[f"schemathesis {label}"][status] += 1
            if fault:
                self.faults.append(f"{label}: {fault}")
            if num_cases % PROBE_EVERY == 0:
                self.probe(label)

        send_documented(self.url, count, take)
        return num_cases

    def _take(self, case: Case, statuses: list[str]) -> None:
        for status in statuses:
            self.answers[case.kind][status] += 1
        wrong = [s for s in statuses if s == HUNG or (s[0] == "5" and s != "503")]
        if case.sound and statuses == [CLOSED]:
            wrong = statuses
        if wrong:
            self.faults.append(f"{case.kind}: {wrong} for {case.data[:400]!r}")

    def _send(self, case: Case) -> list[str]:
        """The statuses of all answers on a connection of its own; what came instead of one."""
        where = urlsplit(self.url)
        received = b""
        with socket.create_connection((where.hostname, where.port), TIMEOUT_S) as connection:
            try:
                connection.sendall(case.data)
                if not case.sound:
                    connection.shutdown(socket.SHUT_WR)
                while data := connection.recv(1 << 16):
                    received += data
            except TimeoutError:
                return [HUNG]
            except OSError:
                pass
        return [status.decode() for status in STATUS.findall(received)] or [CLOSED]

    def _probe(self) -> Any:
        body = {"model": self.model, "prompt": "the sea", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        answer.raise_for_status()
        return answer.json()["choices"]

    def engine(self) -> tuple[int, int]:
        """Process id and restarts: both must stay."""
        stats = httpx.get(f"{self.url}/v1/stats").json()
        return stats["info"]["pid"], stats["num_restarts"]

    def table(self) -> str:
        columns = sorted({status for counts in self.answers.values() for status in counts})
        width = max(map(len, self.answers))
        lines = [" " * width + "".join(f"{column:>8}" for column in columns)]
        for kind, counts in sorted(self.answers.items()):
            cells = (f"{counts[column] or '':>8}" for column in columns)
            lines.append(f"{kind:<{width}}" + "".join(cells))
        return "\n".join(lines)


def tracebacks(log: Path) -> Iterator[str]:
    """Lines of the server's log that follow the head of a traceback, for the eye."""
    for text in log.read_text(errors="replace").split("Traceback (most recent call last)")[1:]:
        yield text.strip().splitlines()[-1][:300]


def main(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        log = None
        if options.url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-"))
            log = Path(folder) / "server.log"
            stream = stack.enter_context(log.open("wb"))
            options.url = stack.enter_context(tiny_server(2, *TINY_OVERRIDES, stderr=stream))
        fuzz = Fuzz(options.url)
        engine = fuzz.engine()
        num_documented = 0 if options.no_schema else fuzz.documented(options.count // 5)
        fuzz.raw(options.count - num_documented, options.seed)
        fuzz.probe("all")
        if fuzz.engine() != engine:
            fuzz.faults.append(f"the engine was {engine}, is {fuzz.engine()} (pid, restarts)")
        if log is not None:
            fuzz.faults += [f"the server's log has a traceback: {end}" for end in tracebacks(log)]
    print(fuzz.table())
    print(
        f"{options.count:,} requests, {num_documented:,} of them from the OpenAPI document; ",
        end="",
    )
    print(f"{fuzz.num_probes:,} valid ones in between; {len(fuzz.faults):,} faults")
    for fault in fuzz.faults[:20]:
        print("  ", fault)
    return 1 if fuzz.faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-schema", action="store_true", help="raw bytes only")
    sys.exit(main(parser.parse_args()))
