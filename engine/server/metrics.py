"""What Prometheus scrapes from the front end: times of requests, counts by adapter and by route.

An Observer: routes report to it and know nothing of Prometheus. Names and buckets are vLLM's where
it has them. The engine process's own numbers come from EngineCollector.
"""

from collections.abc import Callable, Collection, Iterator

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.server.client import EngineClient
from engine.server.engine_collector import EngineCollector
from engine.server.observer import RequestRecord

OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
LENGTH_BUCKETS = tuple(float(m * 10**power) for power in range(6) for m in (1, 2, 5))


class Metrics:
    """One server's; `max_adapter_labels` bounds the adapters that are counted by name."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, client: EngineClient, model_name: str, max_adapter_labels: int) -> None:
        self._registry = registry = CollectorRegistry()
        self._adapters = AdapterCounts(
            max_adapter_labels, lambda: {model_name, *(info.name for info in client.adapters)}
        )

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model_name)

        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "Seconds to a request's first token", TTFT_BUCKETS
        )
        tokens = Histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between a sample's tokens",
            ["model_name"],
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        registry.register(SecondName(tokens, "vllm:time_per_output_token_seconds"))
        self._between_tokens = tokens.labels(model_name)
        self._mean_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's seconds per token and sample after the first",
            TOKEN_BUCKETS,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "Seconds of a whole request", REQUEST_BUCKETS
        )
        self._prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Tokens of a request's prompts", LENGTH_BUCKETS
        )
        self._generated_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens of a request's answers", LENGTH_BUCKETS
        )
        self._success = Counter(
            "vllm:request_success",
            "Requests by how they ended",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._answers = Counter(
            "lora_engine:http_requests",
            "Answered HTTP requests; the route is a template",
            ["method", "route", "status"],
            registry=registry,
        )
        registry.register(self._adapters)
        registry.register(EngineCollector(client, model_name))
        ProcessCollector(registry=registry)
        ProcessCollector("lora_engine", pid=lambda: client.info.pid, registry=registry)

    def started(self, request: RequestRecord) -> None:
        self._adapters.add(request.adapter or request.model)
        self._prompt_tokens.observe(request.num_prompt_tokens)

    def first_token(self, request: RequestRecord, seconds: float) -> None:
        self._first_token.observe(seconds)

    def token(self, request: RequestRecord, seconds: float) -> None:
        self._between_tokens.observe(seconds)

    def finished(self, request: RequestRecord, reason: str, seconds: float) -> None:
        self._success.labels(request.model, reason).inc()
        self._whole.observe(seconds)
        self._generated_tokens.observe(request.num_generated_tokens)
        later_tokens = request.num_generated_tokens - request.num_samples
        if request.first_token_at is not None and later_tokens > 0:
            decoding = seconds - (request.first_token_at - request.started_at)
            self._mean_token.observe(decoding * request.num_samples / later_tokens)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        known = method if method in METHODS else OTHER
        self._answers.labels(known, route or OTHER, str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class SecondName(Collector):
    """A metric's numbers once more, under the name that it had in the past."""

    def __init__(self, collector: Collector, name: str) -> None:
        self._collector = collector
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            old = Metric(self._name, f"Second name of {metric.name}", metric.type)
            old.samples = [
                sample._replace(name=sample.name.replace(metric.name, self._name))
                for sample in metric.samples
            ]
            yield old


class AdapterCounts(Collector):
    """Requests by adapter under at most `max_labels` names; the rest, and those whose label went to
    another, are "other". Labels of adapters that are `loaded` are never taken away.
    """

    def __init__(self, max_labels: int, loaded: Callable[[], Collection[str]]) -> None:
        self._max_labels = max_labels
        self._loaded = loaded
        self._counts: dict[str, int] = {}
        self._num_other = 0

    def add(self, name: str) -> None:
        if name != OTHER and (name in self._counts or self._has_room()):
            self._counts[name] = self._counts.get(name, 0) + 1
        else:
            self._num_other += 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "lora_engine:adapter_requests",
            "Requests by adapter; the base has the model's name",
            labels=["adapter"],
        )
        for name, count in self._counts.items():
            family.add_metric([name], count)
        family.add_metric([OTHER], self._num_other)
        yield family

    def _has_room(self) -> bool:
        """Whether one more name fits, after the oldest label of an unloaded adapter has gone."""
        if len(self._counts) < self._max_labels:
            return True
        loaded = self._loaded()
        gone = next((name for name in self._counts if name not in loaded), None)
        if gone is None:
            return False
        self._num_other += self._counts.pop(gone)
        return True
