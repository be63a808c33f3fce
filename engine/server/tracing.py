"""OpenTelemetry spans, one a request, sent to `server.otel_endpoint` (OTLP over HTTP).

An extra: `pip install 'lora-engine[otel]'`; nothing of it is imported unless an endpoint is set.
Attributes follow OpenTelemetry's conventions for generative AI. Neither prompts nor answers are in
them.
"""

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine import __version__
from engine.errors import ConfigError
from engine.server.observer import Observer, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

SERVICE_NAME = "lora-engine"


class Tracing:
    """Passes all on to `observer`, and keeps a span for each request from its start to its end."""

    def __init__(self, observer: Observer, provider: "TracerProvider") -> None:
        self.content_type = observer.content_type
        self._observer = observer
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE_NAME, __version__)
        self._spans: dict[RequestRecord, Span] = {}

    def started(self, request: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind

        self._observer.started(request)
        self._spans[request] = self._tracer.start_span(
            f"{request.route} {request.model}",
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": "chat" if "chat" in request.route else "text_completion",
                "gen_ai.request.model": request.model,
                "gen_ai.request.choice.count": request.num_samples,
                "gen_ai.usage.input_tokens": request.num_prompt_tokens,
                "lora_engine.request_id": request.request_id,
                "lora_engine.adapter": request.adapter,
            },
        )

    def first_token(self, request: RequestRecord, seconds: float) -> None:
        self._observer.first_token(request, seconds)
        self._spans[request].add_event("first token", {"seconds": seconds})

    def token(self, request: RequestRecord, seconds: float) -> None:
        self._observer.token(request, seconds)

    def finished(self, request: RequestRecord, reason: str, seconds: float) -> None:
        from opentelemetry.trace import StatusCode

        self._observer.finished(request, reason, seconds)
        span = self._spans.pop(request)
        span.set_attribute("gen_ai.usage.output_tokens", request.num_generated_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [reason])
        if reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._observer.answered(method, route, status, seconds)

    def render(self) -> bytes:
        return self._observer.render()

    def flush(self) -> None:
        """Send the spans that have ended."""
        self._provider.force_flush()


class TraceContext:
    """ASGI middleware: spans of a request become children of the caller's, told by the header
    `traceparent`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.context import attach, detach
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        carrier = dict(Headers(scope=scope))
        token = attach(TraceContextTextMapPropagator().extract(carrier))
        try:
            await self._app(scope, receive, send)
        finally:
            detach(token)


def open_tracing(
    observer: Observer, endpoint: str, exporter: "SpanExporter | None" = None
) -> Tracing:
    """Spans go to `endpoint` in batches, in the background, or to another exporter. Raises
    ConfigError if the extra is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": SERVICE_NAME, "service.version": __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(exporter or _otlp(endpoint)))
    except ImportError as error:
        raise ConfigError(
            f"server.otel_endpoint: is {endpoint}, but OpenTelemetry is not installed ({error}); "
            "pip install 'lora-engine[otel]', or set it to null"
        ) from error
    return Tracing(observer, provider)


def _otlp(endpoint: str) -> "SpanExporter":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter: SpanExporter = OTLPSpanExporter(endpoint)
    return exporter
