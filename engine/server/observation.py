"""What is observed by configuration: metrics always, spans with `server.otel_endpoint`."""

from starlette.types import ASGIApp

from engine.config import ServerConfig
from engine.server.client import EngineClient
from engine.server.metrics import Metrics
from engine.server.observer import Observer
from engine.server.tracing import TraceContext, open_tracing


def open_observer(client: EngineClient, cfg: ServerConfig, model_name: str) -> Observer:
    """For `build_app`. Raises ConfigError."""
    metrics = Metrics(client, model_name, cfg.max_adapter_labels)
    if cfg.otel_endpoint is None:
        return metrics
    return open_tracing(metrics, cfg.otel_endpoint)


def traced(app: ASGIApp, cfg: ServerConfig) -> ASGIApp:
    """The app that uvicorn runs: with tracing, spans belong to the caller's trace."""
    return app if cfg.otel_endpoint is None else TraceContext(app)
