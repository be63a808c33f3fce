"""Where log lines of the server go and what they look like: text or JSON, on standard error.

uvicorn's and other libraries' lines come the same way. The request id is in each line that a
request causes. Values of variables are never printed with tracebacks: keys may be among them.
"""

import logging
import sys
from typing import TYPE_CHECKING

import msgspec
from loguru import logger

from engine.config import LogLevel

if TYPE_CHECKING:
    from loguru import Message, Record

FORMAT = "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> {message}"


def log_to_stderr(level: LogLevel, *, json: bool = False) -> None:
    """Replaces all earlier settings, loguru's and the standard library's."""
    logger.remove()
    name = level.value.upper()
    if json:
        logger.add(_write_json, level=name, format=_traceback, backtrace=False, diagnose=False)
    else:
        logger.add(sys.stderr, level=name, format=_text, backtrace=False, diagnose=False)
    logging.basicConfig(handlers=[_ToLoguru()], level=logging.WARNING, force=True)
    # It warns when bytes go to a caller who has left, which is nothing unusual.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def _text(record: "Record") -> str:
    own_id = " <dim>{extra[request_id]}</dim>" if "request_id" in record["extra"] else ""
    return FORMAT + own_id + "\n{exception}"


def _traceback(record: "Record") -> str:
    return "{exception}"


def _write_json(message: "Message") -> None:
    sys.stderr.write(_json_line(message.record, str(message)) + "\n")


def _json_line(record: "Record", traceback: str) -> str:
    """`extra` is what the logger was bound to, the request id above all."""
    line = {
        **record["extra"],
        "time": record["time"].isoformat(),
        "level": record["level"].name.lower(),
        "message": record["message"],
        "logger": record["name"],
        "process": record["process"].id,
    }
    if traceback:
        line["exception"] = traceback
    return msgspec.json.encode(line, enc_hook=str).decode()


class _ToLoguru(logging.Handler):
    """Hands lines of the standard library's loggers to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        name: str | int = record.levelname
        try:
            logger.level(str(name))
        except ValueError:
            name = record.levelno
        own = logger.patch(lambda line: line.update(name=record.name))  # type: ignore[call-arg]
        own.opt(exception=record.exc_info).log(name, record.getMessage())
