"""What Prometheus and gateways read: names, values, labels that stay few; spans beside them."""

import asyncio
import builtins
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from observed_client import STATS, ObservedClient, adapter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import ConfigError
from engine.server.client import EngineState
from engine.server.metrics import Metrics
from engine.server.observer import RequestRecord
from engine.server.tracing import TraceContext, open_tracing

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
Labels = frozenset[tuple[str, str]]


def labels(**values: str) -> Labels:
    return frozenset(values.items())


MODEL = labels(model_name="tiny")


def scraped(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    """Samples by name and labels, as Prometheus' own parser reads them."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples]
    found = {(one.name, frozenset(one.labels.items())): one.value for one in samples}
    assert len(found) == len(samples), "a series is there twice"
    return found


def make(*names: str, max_adapter_labels: int = 64) -> tuple[ObservedClient, Metrics]:
    client = ObservedClient(*names, pid=os.getpid())
    return client, Metrics(client, "tiny", max_adapter_labels)


def request(adapter: str = "", **changes: Any) -> RequestRecord:
    values = {"num_prompt_tokens": 7, "num_samples": 1, "started_at": 10.0} | changes
    return RequestRecord("id", "/v1/completions", "tiny", adapter, **values)


def test_the_engines_numbers_have_vllms_names() -> None:
    client, metrics = make("pirate", "json")
    found = scraped(metrics)
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 1000,
        "vllm:generation_tokens_total": 77,
        "vllm:prefix_cache_queries_total": 1000,
        "vllm:prefix_cache_hits_total": 250,
        "vllm:num_preemptions_total": 6,
        "lora_engine:adapter_slots": 8,
        "lora_engine:adapters_resident": 5,
        "lora_engine:adapters_loaded": 2,
        "lora_engine:adapter_loads_total": 9,
        "lora_engine:adapter_evictions_total": 4,
    }
    assert {name: found[name, MODEL] for name in expected} == expected
    assert found["lora_engine:adapter_load_seconds_sum", frozenset()] == 1.5
    assert found["lora_engine:adapter_load_seconds_count", frozenset()] == 9
    assert found["lora_engine:engine_restarts_total", frozenset()] == 1
    client.state = EngineState.dead
    states = {
        state: scraped(metrics)["lora_engine:engine_state", labels(state=state.value)]
        for state in EngineState
    }
    assert states == {state: float(state is EngineState.dead) for state in EngineState}


def test_the_gauge_that_gateways_read() -> None:
    """One series, three labels, comma-separated names, a time as value."""
    _, metrics = make()
    before = time.time()
    ((own, value),) = [
        (dict(key[1]), value)
        for key, value in scraped(metrics).items()
        if key[0] == "vllm:lora_requests_info"
    ]
    assert own == {
        "max_lora": "8",
        "running_lora_adapters": "pirate,shout",
        "waiting_lora_adapters": "json",
    }
    assert before <= value <= time.time()


def test_memory_of_both_processes() -> None:
    client, metrics = make()
    found = scraped(metrics)
    assert found["process_resident_memory_bytes", frozenset()] > 1 << 20
    assert found["lora_engine_process_resident_memory_bytes", frozenset()] > 1 << 20
    client.info = ObservedClient(pid=1 << 30).info
    assert ("lora_engine_process_resident_memory_bytes", frozenset()) not in scraped(metrics)


def test_times_of_a_request() -> None:
    _, metrics = make()
    own = request(num_samples=2)
    metrics.started(own)
    own.first_token_at = 10.5
    metrics.first_token(own, 0.5)
    for seconds in (0.03, 0.2, 0.2, 0.03):
        metrics.token(own, seconds)
    own.num_generated_tokens = 6
    metrics.finished(own, "length", 1.5)
    found = scraped(metrics)
    for name, count, total in (
        ("time_to_first_token_seconds", 1, 0.5),
        ("inter_token_latency_seconds", 4, 0.46),
        ("time_per_output_token_seconds", 4, 0.46),
        ("request_time_per_output_token_seconds", 1, 0.5),
        ("e2e_request_latency_seconds", 1, 1.5),
        ("request_prompt_tokens", 1, 7),
        ("request_generation_tokens", 1, 6),
    ):
        assert found[f"vllm:{name}_count", MODEL] == count, name
        assert found[f"vllm:{name}_sum", MODEL] == pytest.approx(total), name
    bucket = "vllm:inter_token_latency_seconds_bucket"
    assert found[bucket, labels(model_name="tiny", le="0.05")] == 2
    reason = labels(model_name="tiny", finished_reason="length")
    assert found["vllm:request_success_total", reason] == 1


def test_a_request_without_tokens_has_no_time_per_token() -> None:
    _, metrics = make()
    metrics.started(own := request())
    metrics.finished(own, "abort", 0.1)
    found = scraped(metrics)
    assert found["vllm:request_time_per_output_token_seconds_count", MODEL] == 0
    assert found["vllm:e2e_request_latency_seconds_count", MODEL] == 1


def adapter_counts(metrics: Metrics) -> dict[str, float]:
    return {
        dict(key[1])["adapter"]: value
        for key, value in scraped(metrics).items()
        if key[0] == "lora_engine:adapter_requests_total"
    }


def test_adapters_are_counted_by_name_up_to_a_bound() -> None:
    _, metrics = make("a", "b", "c", max_adapter_labels=2)
    for name in ("a", "b", "a", "c", "c"):
        metrics.started(request(name))
    assert adapter_counts(metrics) == {"a": 2, "b": 1, "other": 2}


def test_an_unloaded_adapters_label_goes_to_a_new_one_and_no_request_is_lost() -> None:
    client, metrics = make("a", "b", max_adapter_labels=2)
    for name in ("a", "b", "b"):
        metrics.started(request(name))
    client.adapters = (adapter("a"), adapter("c"))
    metrics.started(request("c"))
    assert adapter_counts(metrics) == {"a": 1, "c": 1, "other": 2}


def test_the_base_keeps_its_label_and_other_is_nobodys_name() -> None:
    _, metrics = make("other", "a", max_adapter_labels=1)
    for name in ("", "other", "a", ""):
        metrics.started(request(name))
    assert adapter_counts(metrics) == {"tiny": 2, "other": 2}


def test_hostile_names_stay_inside_their_label() -> None:
    client, metrics = make()
    name = 'x"} 1\nfake_metric 5\\'
    client.stats = msgspec.structs.replace(STATS, running_adapters=[name])
    metrics.started(request(name))
    assert adapter_counts(metrics) == {name: 1, "other": 0}
    assert ("fake_metric", frozenset()) not in scraped(metrics)


def test_answers_are_counted_by_route_and_status() -> None:
    _, metrics = make()
    metrics.answered("POST", "/v1/completions", 200, 0.1)
    metrics.answered("POST", "/v1/completions", 429, 0.1)
    for method in ("BREW", "X" * 100):
        metrics.answered(method, "", 404, 0.1)
    found = scraped(metrics)
    name = "lora_engine:http_requests_total"
    assert found[name, labels(method="POST", route="/v1/completions", status="200")] == 1
    assert found[name, labels(method="POST", route="/v1/completions", status="429")] == 1
    assert found[name, labels(method="other", route="other", status="404")] == 2
    assert sum(key[0] == name for key in found) == 3


def test_the_dashboard_asks_for_what_there_is() -> None:
    _, metrics = make("a")
    metrics.started(own := request())
    metrics.finished(own, "stop", 0.1)
    metrics.answered("GET", "/health", 200, 0.1)
    there = {name for name, _ in scraped(metrics)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [one["expr"] for panel in panels for one in panel.get("targets", ())]
    names = {name for expr in asked for name in re.findall(r"[a-z0-9_:]+(?=\{)", expr)}
    assert names - there == set() and len(names) > 15


# ---------------------------------------------------------------------- spans


def test_a_request_is_a_span_in_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    _, metrics = make()
    tracing = open_tracing(metrics, "unused", exporter)
    own = request("pirate")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tracing.started(own)
        tracing.first_token(own, 0.25)
        tracing.token(own, 0.1)
        own.num_generated_tokens = 2
        tracing.finished(own, "stop", 0.4)
        tracing.answered("POST", "/v1/completions", 200, 0.4)

    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    scope = {
        "type": "http",
        "headers": [(b"traceparent", f"00-{trace_id}-{parent_id}-01".encode())],
    }
    asyncio.run(TraceContext(app)(scope, None, None))  # type: ignore[arg-type]
    tracing.flush()
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == trace_id
    assert f"{span.parent.span_id:016x}" == parent_id
    expected = {
        "gen_ai.request.model": "tiny",
        "lora_engine.adapter": "pirate",
        "lora_engine.request_id": "id",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert {name: span.attributes[name] for name in expected} == expected
    assert [event.name for event in span.events] == ["first token"]
    assert span.status.is_ok or span.status.is_unset
    found = scraped(metrics)
    assert found["vllm:time_to_first_token_seconds_count", MODEL] == 1
    assert found["vllm:inter_token_latency_seconds_count", MODEL] == 1


def test_a_fault_marks_its_span() -> None:
    exporter = InMemorySpanExporter()
    tracing = open_tracing(make()[1], "unused", exporter)
    tracing.started(own := request())
    tracing.finished(own, "error", 0.1)
    tracing.flush()
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok and not span.status.is_unset


def test_an_endpoint_without_the_extra_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_otel(name: str, *args: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_otel)
    with pytest.raises(ConfigError, match=r"server.otel_endpoint: .*pip install .*otel"):
        open_tracing(make()[1], "http://localhost:4318/v1/traces")
