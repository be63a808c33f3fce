"""Refusals and faults as HTTP answers in OpenAI's error shape.

Owns statuses, types and codes. What the engine raises is told apart here; nothing that was not
written for users leaves the process.
"""

import re

import msgspec
from loguru import logger

from engine.errors import AdapterError, EngineDiedError, EngineError, RequestError, SlowReaderError

INVALID = "invalid_request_error"
MODEL_NOT_FOUND = "model_not_found"
RETRY_AFTER_S = 5
_PARAM = re.compile(r"([a-z_]+)(?: of token \d+)?: ")

Header = tuple[bytes, bytes]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ClientGone(Exception):
    """The caller has left; there is nobody to answer."""


class ApiError(Exception):
    """An answer other than success. `message` is for the caller."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, kind, param, code)
        self.headers = headers

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorAnswer(self.detail))


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unknown_model(message: str) -> ApiError:
    return ApiError(404, message, param="model", code=MODEL_NOT_FOUND)


def unavailable(message: str) -> ApiError:
    return ApiError(
        503, message, kind="service_unavailable_error", code="unavailable", headers=(_retry(),)
    )


def overloaded(message: str) -> ApiError:
    return ApiError(
        429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=(_retry(),)
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the request was not finished within {seconds:g} s (server.request_timeout_s) and has "
        "been given up; ask for fewer tokens",
        kind="timeout_error",
        code="timeout",
    )


def internal(request_id: str) -> ApiError:
    return ApiError(
        500,
        f"the server failed on this request; its log has the reason under request id {request_id}",
        kind="server_error",
        code="internal_error",
    )


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """The answer to what a handler raised. Faults of the server are logged and not told."""
    match error:
        case ApiError():
            return error
        case RequestError():
            found = _PARAM.match(str(error))
            return bad_request(str(error), param=found[1] if found else None)
        case AdapterError():
            return unknown_model(str(error))
        case EngineDiedError():
            return unavailable(str(error))
        case SlowReaderError():
            return ApiError(408, str(error), kind="timeout_error", code="slow_reader")
        case RecursionError():
            return bad_request("the body is nested too deeply")
        case EngineError():
            logger.error("request {}: {}", request_id, error)
            return internal(request_id)
    logger.opt(exception=error).error("request {} failed", request_id)
    return internal(request_id)


def _retry() -> Header:
    return b"retry-after", str(RETRY_AFTER_S).encode()
