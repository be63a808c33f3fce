"""`python -m engine command=serve` as a user runs it: its start, its ways to end, its status."""

import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_support import BASE, make_model
from recorder import until
from server_support import Server, spawn, start_server

SLOW = {"model": BASE, "prompt": [[1, 267]] * 8, "n": 16, "max_tokens": 400, "ignore_eos": True}
PATIENT = "server.max_stream_events=100000"  # answers may wait for their reader
COMPLETIONS = "/v1/completions"


def run(*arguments: str) -> tuple[int, str, str]:
    """Status, standard output and standard error of a command that ends by itself."""
    process = spawn(*arguments)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def body(**fields: Any) -> dict[str, Any]:
    return SLOW | {"stream": True} | fields


def is_draining(server: Server) -> bool:
    return httpx.get(f"{server.url}/ready").status_code == 503


def test_sigterm_finishes_what_is_open_refuses_what_is_new_and_ends_well(tmp_path: Path) -> None:
    with start_server(tmp_path, PATIENT) as server:
        engine_pid = server.engine_pid
        slow = body(prompt=[1, 267])
        with httpx.stream("POST", server.url + COMPLETIONS, json=slow, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            server.process.send_signal(signal.SIGTERM)
            until(lambda: is_draining(server))
            refused = httpx.post(server.url + COMPLETIONS, json=body(stream=False))
            assert refused.status_code == 503 and "shutting down" in refused.text
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line for line in rest) == 16
        assert server.process.wait(30) == 0
        assert is_gone(engine_pid)
        assert "SIGTERM: open requests are finished" in server.log
        assert "Traceback" not in server.log


def test_a_second_signal_ends_at_once_and_the_engine_with_it(tmp_path: Path) -> None:
    with start_server(tmp_path, PATIENT) as server:
        engine_pid = server.engine_pid
        with httpx.stream("POST", server.url + COMPLETIONS, json=body(), timeout=60) as answer:
            lines = answer.iter_lines()  # the answer is closed when this goes
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: is_draining(server))
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(5) == -signal.SIGTERM
        until(lambda: is_gone(engine_pid))


def test_the_drain_has_its_deadline_and_the_open_stream_is_told(tmp_path: Path) -> None:
    overrides = (PATIENT, "server.drain_timeout_s=0.1", "server.json_log=true")
    with start_server(tmp_path, *overrides) as server:
        with httpx.stream("POST", server.url + COMPLETIONS, json=body(), timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        assert last.startswith('data: {"error":') and "has shut down" in last
        assert server.process.wait(30) == 0
        assert '"message":"8 streams are given up after 0.1 s"' in server.log


def test_a_start_that_fails_is_one_line(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    status, output, errors = run(
        *("command=serve", "model=hf", f"model.path={model}", "model.dtype=float32"),
        *("lora=default", "+lora.adapters.x=/nowhere", "log_level=warning", "server.port=0"),
    )
    assert (status, output) == (1, "")
    assert errors == "/nowhere: no such directory; give a PEFT adapter directory\n"


def test_a_port_that_is_taken_is_told_before_anything_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, output, errors = run(
            "command=serve", "model=hf", "model.path=/nowhere", f"server.port={port}"
        )
    assert (status, output) == (1, "")
    assert errors == (
        f"server.host, server.port: cannot listen on '127.0.0.1', port {port} (Address already in "
        "use); choose others (port 0 is any free one)\n"
    )


@pytest.mark.parametrize("override", ["server.port=-1", "server.porto=1"])
def test_a_wrong_setting_is_one_line(override: str) -> None:
    status, output, errors = run("command=serve", override)
    assert (status, output) == (1, "") and len(errors.splitlines()) == 1
    assert errors.startswith(override.partition("=")[0])


def test_the_settings_are_shown() -> None:
    status, output, _ = run("command=serve", "--cfg", "job")
    assert status == 0 and "  max_requests: 1024" in output and "  name: serve" in output
