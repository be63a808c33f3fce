"""The ASGI app: routes, and the border that every request passes: its id, its key, its faults.

Knows no route's work and not how the engine runs.
"""

import re
import time
import uuid
from collections.abc import Awaitable, Callable

from loguru import logger
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.config import ServerConfig
from engine.errors import shown
from engine.server import adapters, chat, completions, info, openapi, tokens
from engine.server.client import EngineClient
from engine.server.errors import ApiError, ClientGone, as_api_error
from engine.server.exchange import Exchange
from engine.server.front import FrontEnd
from engine.server.observation import open_observer
from engine.server.observer import Observer
from engine.server.page import page_routes
from engine.server.service import Service

REQUEST_ID = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_PATH_CHARS = 200
CLIENT_LEFT = 499  # nginx's number for it; seen by observers only

Handler = Callable[[Service, Exchange], Awaitable[None]]
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", chat.ROUTE, chat.chat_completions),
    ("POST", completions.ROUTE, completions.completions),
    ("GET", "/v1/models", info.models),
    ("GET", "/v1/models/{model:path}", info.model),
    ("POST", "/v1/load_lora_adapter", adapters.load_adapter),
    ("POST", "/v1/load_lora_adapter_from_tensors", adapters.load_adapter_from_tensors),
    ("POST", "/v1/unload_lora_adapter", adapters.unload_adapter),
    ("GET", "/v1/memory", info.memory),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/health", info.health),
    ("GET", "/ready", info.ready),
    ("GET", "/metrics", info.metrics),
    ("GET", "/version", info.version),
    ("GET", "/openapi.json", openapi.document),
)


def build_app(
    client: EngineClient, cfg: ServerConfig, front: FrontEnd, observer: Observer | None = None
) -> Starlette:
    """The app over a client that its owner starts and closes; what is observed is the config's
    choice unless an observer is given. Raises ConfigError.
    """
    observer = observer or open_observer(client, cfg, front.model_name)
    service = Service.of(client, cfg, front, observer)
    routes = [
        Route(path, _Endpoint(service, handler), methods=[method])
        for method, path, handler in ROUTES
    ]
    app = Starlette(
        routes=[*routes, *page_routes(client, cfg)],
        middleware=[Middleware(_Border, service=service)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    return app


class _Endpoint:
    """A handler as an ASGI app."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self._service = service
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, scope["state"][REQUEST_ID])
        await self._handler(self._service, exchange)


class _Border:
    """Gives each request an id, checks its key, and lets no fault through as anything but an
    answer in OpenAI's shape.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get(REQUEST_ID, ""))
        scope.setdefault("state", {})[REQUEST_ID] = request_id
        started_at, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (REQUEST_ID.encode(), request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        with logger.contextualize(request_id=request_id):
            try:
                self._service.front.keys.check(scope["path"], headers)
                await self._app(scope, receive, send_with_id)
            except ClientGone:
                logger.debug("request {}: the caller has left", request_id)
            except Exception as error:
                refused = as_api_error(error, request_id)
                if not status:
                    await Exchange(scope, receive, send_with_id, request_id).refuse(refused)
            finally:
                self._report(scope, status or CLIENT_LEFT, time.perf_counter() - started_at)

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        template = route.path if isinstance(route, Route) else ""
        self._service.observer.answered(scope["method"], template, status, seconds)
        if self._service.cfg.access_log:
            path = shown(scope["path"], MAX_PATH_CHARS)
            logger.info("{} {} {} {:.0f} ms", scope["method"], path, status, 1000 * seconds)


def _request_id(given: str) -> str:
    """The caller's own if it is harmless, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette refuses: unknown paths, wrong methods."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}; /openapi.json lists what there is"
    refused = ApiError(error.status_code, message, code="no_such_route")
    headers = dict(error.headers or {})
    return Response(refused.body(), error.status_code, headers, "application/json")
