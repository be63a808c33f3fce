"""Log lines of the server: text or JSON, the request id in each, no values of variables."""

import json
import logging
from collections.abc import Iterator

import pytest
from loguru import logger

from engine.config import LogLevel
from engine.server.logs import log_to_stderr

SECRET = "sk-secret"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logger.remove()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("asyncio").setLevel(logging.NOTSET)


def fail(secret: str) -> None:
    raise ValueError("boom")


def log_all() -> None:
    logger.debug("too quiet")
    with logger.contextualize(request_id="r-1"):
        logger.info("one {} <b> {}", "{x}", "\n two")
        try:
            fail(SECRET)
        except ValueError:
            logger.exception("it failed")
    logging.getLogger("some.library").warning("from %s", "elsewhere")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("asyncio").warning("socket.send() raised exception.")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(LogLevel.info, json=True)
    log_all()
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == "one {x} <b> \n two"
    assert first["level"] == "info" and first["request_id"] == "r-1" and "exception" not in first
    assert second["request_id"] == "r-1" and second["exception"].endswith("ValueError: boom\n")
    assert third["message"] == "from elsewhere" and third["logger"] == "some.library"
    assert "request_id" not in third


def test_own_fields_are_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(LogLevel.info, json=True)
    logger.bind(level="none", adapter=object).info("x")
    found = json.loads(capsys.readouterr().err)
    assert found["level"] == "info" and found["adapter"] == str(object)


def test_text_names_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(LogLevel.info)
    log_all()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("one {x} <b> ") and lines[1] == " two r-1"
    assert lines[-1].endswith("WARNING from elsewhere")
    assert "ValueError: boom" in lines and not any("quiet" in line for line in lines)


@pytest.mark.parametrize("as_json", [False, True])
def test_tracebacks_show_no_values(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    log_to_stderr(LogLevel.debug, json=as_json)
    log_all()
    assert SECRET not in capsys.readouterr().err
