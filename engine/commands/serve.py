"""`command=serve`: the HTTP front end in this process, the engine in one of its own, until SIGTERM
or Ctrl-C.

The first signal drains: new requests get 503, open ones are finished. A second one ends at once.
"""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from loguru import logger
from starlette.types import ASGIApp

from engine.commands.result import JobResult
from engine.config import EngineConfig, ServerConfig
from engine.errors import ConfigError
from engine.server.app import build_app
from engine.server.front import FrontEnd
from engine.server.observation import open_observer, traced
from engine.server.process import STOP_SIGNALS
from engine.server.process_client import ProcessClient

BACKLOG = 2048
# For the last bytes of answers whose streams are over.
FLUSH_TIMEOUT_S = 5


def run(config: EngineConfig) -> JobResult:
    """Serve; raises EngineError if the start fails."""
    client = ProcessClient(config)
    try:
        with _bound_socket(config.server) as listener:
            asyncio.run(_serve(config, FrontEnd.open(config), client, listener))
    finally:
        client.kill()  # nothing to do unless the above was cut off
    return JobResult(tokens_per_second=None, kv_tokens=client.stats.num_kv_tokens)


async def _serve(
    config: EngineConfig, front: FrontEnd, client: ProcessClient, listener: socket.socket
) -> None:
    cfg, stop = config.server, _stop_event()
    observer = open_observer(client, cfg, front.model_name)
    app = traced(build_app(client, cfg, front, observer), cfg)
    try:
        starting = asyncio.create_task(client.start())
        if await _done_before(stop, starting):
            await starting
            await _serve_until(stop, _Server(app, listener), client, cfg.drain_timeout_s)
        else:
            starting.cancel()
    finally:
        await client.close()


async def _serve_until(
    stop: asyncio.Event, server: "_Server", client: ProcessClient, drain_timeout_s: float
) -> None:
    serving = asyncio.create_task(server.serve())
    if not await _done_before(stop, serving):
        await client.drain(drain_timeout_s)
    server.should_exit = True
    await serving


class _Server(uvicorn.Server):
    """Listens on a socket that is bound already, and leaves signals to its owner: they must drain
    while it still answers.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                backlog=BACKLOG,
                log_config=None,
                access_log=False,  # the app logs its own
                proxy_headers=False,
                server_header=False,
                ws="none",
                lifespan="on",
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
            )
        )
        self._listener = listener

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve([self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        url = _url(self._listener)
        logger.info("listening on {}", url)
        with suppress(OSError):  # nobody may be able to read it
            print(f"listening on {url}", flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop_event() -> asyncio.Event:
    """Set by the first signal to stop; the second one has its ordinary effect."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        logger.info("{}: open requests are finished, a second signal ends at once", number.name)
        for own in STOP_SIGNALS:
            loop.remove_signal_handler(own)
        stop.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _done_before(stop: asyncio.Event, work: asyncio.Task[None]) -> bool:
    """Wait for either; whether the work is done."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return work.done()


def _bound_socket(cfg: ServerConfig) -> socket.socket:
    """Bound, but not listening: nobody is kept waiting while the engine starts."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            cfg.host, cfg.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(
            f"server.host, server.port: cannot listen on {cfg.host!r}, port {cfg.port} "
            f"({error.strerror}); choose others (port 0 is any free one)"
        ) from error
    return bound


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
