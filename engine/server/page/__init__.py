"""The page at `/`: static files without a build step, and the numbers that they poll.

Everything that the page does goes through the public routes; it knows no secrets. Nothing is
loaded from elsewhere: the content security policy forbids it.
"""

from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.config import ServerConfig
from engine.server.client import EngineClient
from engine.server.stats import stats_payload

MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
ASSETS = (
    "index.html",
    "style.css",
    "app.js",
    "api.js",
    "dom.js",
    "memory.js",
    "adapters.js",
    "playground.js",
)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(client: EngineClient, cfg: ServerConfig) -> list[Route]:
    """`/`, its files under `/page/`, and `/v1/stats`; without `cfg.page` only the last."""

    async def stats(request: Request) -> Response:
        body = msgspec.json.encode(stats_payload(client))
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    numbers = Route("/v1/stats", stats, methods=["GET"])
    if not cfg.page:
        return [numbers]
    assets = [_asset(f"/page/{name}", name) for name in ASSETS if name != "index.html"]
    return [numbers, _asset("/", "index.html"), *assets]


def _asset(path: str, name: str) -> Route:
    body = files(__name__).joinpath(name).read_bytes()
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    async def asset(request: Request) -> Response:
        return Response(body, media_type=media_type, headers=HEADERS)

    return Route(path, asset, methods=["GET"])
