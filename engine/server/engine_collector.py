"""What Prometheus is told of the engine process, read from its last EngineStats when scraped.

Names are vLLM's where it has one, so that its dashboards and gateways work. Knows nothing of
requests and HTTP. Totals begin anew with each engine process, as Prometheus expects of a restart.
"""

import time
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from engine.server.client import EngineClient, EngineState
from engine.server.messages import EngineStats

# name, what it says, how it is read
GAUGES = (
    ("vllm:num_requests_running", "Samples in the running batch", "num_running"),
    ("vllm:num_requests_waiting", "Samples that wait for a place in it", "num_waiting"),
    ("lora_engine:adapter_slots", "Adapters that one batch can mix", "num_adapter_slots"),
    ("lora_engine:adapters_resident", "Adapters in device memory", "num_adapters_resident"),
)
COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens taken in", "prompt_tokens_total"),
    ("vllm:generation_tokens", "Tokens sampled", "generated_tokens_total"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache",
     "prompt_tokens_total"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache",
     "cached_prompt_tokens_total"),
    ("vllm:num_preemptions", "Requests put back to be computed again", "preemptions_total"),
    ("lora_engine:adapter_loads", "Adapters copied to device memory", "adapter_loads_total"),
    ("lora_engine:adapter_evictions", "Adapters that gave their place to another",
     "adapter_evictions_total"),
)  # fmt: skip


class EngineCollector(Collector):
    """Give it to a registry; `model_name` labels what vLLM labels with it."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model = [model_name]

    def collect(self) -> Iterator[Metric]:
        client, stats = self._client, self._client.stats
        for name, text, field in GAUGES:
            yield self._gauge(name, text, getattr(stats, field))
        for name, text, field in COUNTERS:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric(self._model, getattr(stats, field))
            yield family
        text = "Fraction of KV tokens in use, 0 to 1"
        yield self._gauge("vllm:kv_cache_usage_perc", text, kv_usage(stats))
        yield self._gauge(
            "lora_engine:adapters_loaded", "Adapters that requests may name", len(client.adapters)
        )
        yield SummaryMetricFamily(
            "lora_engine:adapter_load_seconds",
            "Seconds of copying adapters to device memory",
            count_value=stats.adapter_loads_total,
            sum_value=stats.adapter_load_seconds_total,
        )
        yield CounterMetricFamily(
            "lora_engine:engine_restarts",
            "Engine processes started after the first",
            client.num_restarts,
        )
        yield _states(client.state)
        yield lora_requests_info(stats)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric(self._model, value)
        return family


def kv_usage(stats: EngineStats) -> float:
    return stats.num_kv_tokens_used / stats.num_kv_tokens if stats.num_kv_tokens else 0.0


def lora_requests_info(stats: EngineStats) -> GaugeMetricFamily:
    """What the Gateway API Inference Extension scrapes to send a request where its adapter is:
    all is in the labels, the value says when it was true.
    """
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and of waiting requests",
        labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    waiting, running = ",".join(stats.waiting_adapters), ",".join(stats.running_adapters)
    family.add_metric([str(stats.num_adapter_slots), waiting, running], time.time())
    return family


def _states(current: EngineState) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "lora_engine:engine_state", "1 for the state that the engine is in", labels=["state"]
    )
    for state in EngineState:
        family.add_metric([state.value], float(state is current))
    return family
