"""A server on the tiny llama of tests/data with random adapters, for the load and fuzz scripts."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
from safetensors.torch import save_file
from stress import BASE, adapter_of

ROOT = Path(__file__).parents[1]
KV_TOKENS = 32_768  # 16 MiB: all of it is soon in use, so that memory that grows is a leak
START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 60.0


def write_adapters(folder: Path, count: int) -> dict[str, Path]:
    """PEFT directories of `count` random adapters, by name."""
    paths = {f"a{version:03}": folder / f"a{version:03}" for version in range(count)}
    for version, path in enumerate(paths.values()):
        tensors, config = adapter_of(version)
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))
    return paths


@contextlib.contextmanager
def tiny_server(
    num_adapters: int, *overrides: str, stderr: IO[bytes] | None = None
) -> Iterator[str]:
    """The base URL of a server that has loaded the adapters."""
    with tempfile.TemporaryDirectory(prefix="adapters-") as root:
        paths = write_adapters(Path(root), num_adapters)
        own = (
            *("model=hf", f"model.path={BASE}", "model.dtype=float32"),
            *("lora=default", "lora.max_lora_rank=16", f"server.adapter_roots=[{root}]"),
            *(f"device.memory_bytes={256 << 20}", "memory.fraction=1.0"),
            f"memory.max_kv_tokens={KV_TOKENS}",
        )
        with running_server(*own, *overrides, stderr=stderr) as url:
            for name, path in paths.items():
                body = {"lora_name": name, "lora_path": str(path)}
                httpx.post(f"{url}/v1/load_lora_adapter", json=body).raise_for_status()
            yield url


@contextlib.contextmanager
def running_server(*overrides: str, stderr: IO[bytes] | None = None) -> Iterator[str]:
    """The base URL of a server that is ready; stopped by SIGTERM afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "engine", "command=serve", f"server.port={port}", *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stderr=stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    stop = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < stop:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode} while starting")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {START_TIMEOUT_S:.0f} s")
