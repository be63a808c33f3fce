"""Rows of a benchmark in worker processes: whatever happens to one, the others are measured.

A worker is told which rows are left and answers with one line a row. If it dies, hangs or says that
its device is broken, the row it was at gets the blame and a new one goes on with the rest.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MARK = "@bench "
_ROW, _VALUES, _ERROR, _READY, _LEAVING = "row", "values", "error", "ready", "leaving"
_OVER = "not run, the time was over"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of row `row`: `values`, or an `error`. Row None: what a worker says of itself
    when it has started.
    """

    row: int | None
    values: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a worker may take to start and for each row; no row is begun after
    `deadline` (time.time), None: never.
    """

    start_s: float = 300.0
    row_s: float = 180.0
    deadline: float | None = None

    @property
    def is_over(self) -> bool:
        return self.deadline is not None and time.time() >= self.deadline


# ---------------------------------------------------------------------- in the worker


def serve_rows(
    rows: Sequence[int],
    start: Callable[[], Mapping[str, Any]],
    measure: Callable[[int], Mapping[str, Any]],
    is_broken: Callable[[], bool],
    deadline: float | None = None,
) -> None:
    """Answer for `rows` on stdout. `start` prepares and says what holds for all of them."""
    try:
        _send({_READY: dict(start())})
    except Exception as error:
        traceback.print_exc()
        _send({_LEAVING: True, _ERROR: _words(error)})
        return
    for row in rows:
        if deadline is not None and time.time() >= deadline:
            _send({_ROW: row, _ERROR: _OVER})
            continue
        try:
            _send({_ROW: row, _VALUES: dict(measure(row))})
        except Exception as error:  # whatever it is, it belongs into the row
            traceback.print_exc()
            _send({_ROW: row, _ERROR: _words(error)})
            if is_broken():
                _send({_LEAVING: True})
                return


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _send(message: Mapping[str, Any]) -> None:
    print(_MARK + json.dumps(message), flush=True)


# ---------------------------------------------------------------------- in the parent


def run_rows(
    command: Sequence[str],
    rows: Sequence[int],
    limits: Limits,
    env: Mapping[str, str] | None = None,
) -> Iterator[Answer]:
    """Start `command` with the rows that are left as its last argument, as JSON, until each has an
    answer. `env` is added to this process's environment.
    """
    left = list(rows)
    while left:
        if limits.is_over:
            yield from (Answer(row, {}, _OVER) for row in left)
            return
        yield from _one_worker([*command, json.dumps(left)], left, limits, env)


def _one_worker(
    command: Sequence[str], left: list[int], limits: Limits, env: Mapping[str, str] | None
) -> Iterator[Answer]:
    """Answers of one worker; takes the rows that got one out of `left`, at least one."""
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(worker, lines), daemon=True).start()
    is_ready, wait_s, ending = False, limits.start_s, ""
    try:
        while left:
            message = _next_message(lines, wait_s)
            if message is None:
                ending = f"the process ended with code {worker.wait()}"
                break
            if _LEAVING in message:
                ending = message.get(_ERROR, "")
                break
            if _READY in message:
                is_ready, wait_s = True, limits.row_s
                yield Answer(None, message[_READY])
                continue
            left.remove(message[_ROW])
            yield Answer(message[_ROW], message.get(_VALUES, {}), message.get(_ERROR, ""))
    except TimeoutError:
        ending = f"no answer within {wait_s:.0f} s"
    finally:
        worker.kill()
        worker.wait()
    # A worker that cannot start will not start for the next row either.
    while ending and left:
        yield Answer(left.pop(0), {}, ending)
        if is_ready:
            return


def _read(worker: subprocess.Popen[str], lines: "queue.SimpleQueue[str | None]") -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put(line)
    lines.put(None)


def _next_message(lines: "queue.SimpleQueue[str | None]", seconds: float) -> dict[str, Any] | None:
    """The next answer, None when the worker has ended; other lines go to stderr. TimeoutError."""
    until = time.monotonic() + seconds
    while True:
        try:
            line = lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return None
        if line.startswith(_MARK):
            message: dict[str, Any] = json.loads(line[len(_MARK) :])
            return message
        sys.stderr.write(line)
