"""A server as users start it: `python -m engine command=serve` on a tiny model, in a process of its
own, stopped by SIGTERM.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from conftest import DATA
from front_support import BASE, LOADED, make_model, make_root

from engine.server.messages import EngineStats

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Server:
    """`root`: its adapter root. `process` is the front end; `log_file` has its standard error."""

    url: str
    root: Path
    process: subprocess.Popen[str]
    log_file: Path

    @property
    def log(self) -> str:
        """All that it has written to standard error so far."""
        return self.log_file.read_text()

    @property
    def engine_pid(self) -> int:
        return int(httpx.get(f"{self.url}/v1/stats").json()["info"]["pid"])

    def stats(self) -> EngineStats:
        return EngineStats(**httpx.get(f"{self.url}/v1/stats").json()["stats"])

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def start_server(folder: Path, *overrides: str) -> Iterator[Server]:
    """A ready server with the model and the adapters of `front_support`, its files in `folder`."""
    model, root, log_file = make_model(folder), make_root(folder), folder / "log"
    loaded = [
        f"+lora.adapters.{name}={DATA / 'cases' / case / 'adapter'}"
        for name, case in LOADED.items()
    ]
    arguments = [
        *("command=serve", "model=hf", f"model.path={model}", "model.dtype=float32"),
        *("lora=default", "lora.max_loras_per_batch=4", *loaded),
        *(f"device.memory_bytes={64 << 20}", "memory.fraction=1.0"),
        *("scheduler.max_running_requests=16", "scheduler.max_step_tokens=64"),
        *(f"server.served_model_name={BASE}", "server.port=0", f"server.adapter_roots=[{root}]"),
        *overrides,
    ]
    with log_file.open("w") as log:
        process = spawn(*arguments, stderr=log)
    try:
        yield Server(_url(process, log_file), root, process, log_file)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
        assert process.stdout is not None
        process.stdout.close()


def spawn(*arguments: str, stderr: object = subprocess.PIPE) -> subprocess.Popen[str]:
    """`python -m engine`, with signals as a shell in the foreground leaves them."""
    return subprocess.Popen(
        [sys.executable, "-m", "engine", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,  # type: ignore[arg-type]
        env={key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"},
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _url(process: subprocess.Popen[str], log_file: Path) -> str:
    """Wait for the line that says where it listens."""
    assert process.stdout is not None
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    line = process.stdout.readline()
    watchdog.cancel()
    assert line.startswith("listening on "), f"the server did not start:\n{log_file.read_text()}"
    return line.split()[-1]
