"""The HTTP side of a load run: one streamed completion, adapter changes, the server's numbers.

Speaks OpenAI's completions and vLLM's adapter routes. Knows nothing of schedules and reports.
"""

import asyncio
import json
import random
import ssl
import time
from dataclasses import dataclass
from typing import Any

import httpx
from load_report import Outcome, Sample
from load_workload import Ask
from prometheus_client.parser import text_string_to_metric_families

NUM_POOLS = 32  # httpx searches a pool's connections for each request; small pools keep that short
FRONT_RSS = "process_resident_memory_bytes"
ENGINE_RSS = f"lora_engine_{FRONT_RSS}"


@dataclass(frozen=True)
class Target:
    """Where the server is, and the keys for it."""

    url: str
    api_key: str | None = None
    admin_key: str | None = None


class LoadClient:
    """Use as `async with`. Every method but `stream` raises httpx errors on refusals."""

    def __init__(self, target: Target, timeout_s: float = 600.0) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        context = ssl.create_default_context()
        self._pools = [
            httpx.AsyncClient(
                base_url=target.url,
                verify=context,
                headers=_bearer(target.api_key),
                timeout=httpx.Timeout(timeout_s, connect=60.0),
                limits=limits,
                trust_env=False,
            )
            for _ in range(NUM_POOLS)
        ]
        self._admin = _bearer(target.admin_key)
        self._draw = random.Random(0)

    async def __aenter__(self) -> "LoadClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(*(pool.aclose() for pool in self._pools))

    async def models(self) -> tuple[str, dict[str, str]]:
        """The base model's name, and the adapters' names with their paths."""
        answer = await self._pools[0].get("/v1/models")
        answer.raise_for_status()
        cards = answer.json()["data"]
        base = next(card["id"] for card in cards if card.get("parent") is None)
        return base, {card["id"]: card["root"] for card in cards if card.get("parent") is not None}

    async def load(self, name: str, path: str) -> None:
        await self._change("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload(self, name: str) -> None:
        await self._change("/v1/unload_lora_adapter", {"lora_name": name})

    async def sample(self) -> Sample:
        answer = await self._pools[0].get("/metrics")
        answer.raise_for_status()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for item in family.samples:
                values[item.name] = values.get(item.name, 0.0) + item.value
        return Sample(
            time.monotonic(),
            int(values.get(FRONT_RSS, 0)),
            int(values.get(ENGINE_RSS, 0)),
            int(values.get("vllm:num_requests_running", 0)),
            int(values.get("vllm:num_requests_waiting", 0)),
        )

    async def solo(self, ask: Ask) -> dict[str, Any]:
        """The whole answer's only choice, with log probabilities, nothing streamed."""
        body = _body(ask) | {"logprobs": 2}
        answer = await self._pools[0].post("/v1/completions", json=body)
        answer.raise_for_status()
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    async def stream(self, ask: Ask, due_s: float, leave_after: int | None = None) -> Outcome:
        """One request from its due time to its end. With `leave_after` the connection is dropped
        after that many pieces; 0 is soon after sending.
        """
        outcome = Outcome(due_s)
        try:
            async with asyncio.timeout(0.05 * self._draw.random() if leave_after == 0 else None):
                await self._read(ask, outcome, leave_after)
        except TimeoutError:
            outcome.kind = "disconnected"
        except httpx.HTTPError as error:
            outcome.kind, outcome.detail = f"error {type(error).__name__}", str(error)
        outcome.end_s = time.monotonic()
        return outcome

    async def _read(self, ask: Ask, outcome: Outcome, leave_after: int | None) -> None:
        body = _body(ask) | {"stream": True, "stream_options": {"include_usage": True}}
        pool = self._draw.choice(self._pools)
        async with pool.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                outcome.kind, outcome.detail = _refusal(response)
                return
            rest = b""
            async for data in response.aiter_raw():
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    _take(event, outcome)
                if outcome.kind:
                    return
                if leave_after is not None and len(outcome.token_times_s) >= leave_after:
                    outcome.kind = "disconnected"
                    return
        outcome.kind = "error stream ended early"

    async def _change(self, path: str, body: dict[str, str]) -> None:
        answer = await self._pools[0].post(path, json=body, headers=self._admin)
        answer.raise_for_status()


def _take(event: bytes, outcome: Outcome) -> None:
    """Book one server-sent event."""
    if not event.startswith(b"data: "):
        outcome.kind, outcome.detail = "error not an event", repr(event[:80])
        return
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        outcome.kind = outcome.kind or "completed"
        return
    chunk = json.loads(data)
    if "error" in chunk:
        outcome.kind, outcome.detail = "error in stream", chunk["error"]["message"]
        return
    if chunk.get("usage"):
        outcome.num_tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk["choices"]:
        outcome.token_times_s.append(time.monotonic())
        outcome.text += choice["text"]


def _body(ask: Ask) -> dict[str, Any]:
    """`min_tokens` makes the answer exactly `max_tokens` long."""
    return {
        "model": ask.model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "min_tokens": ask.max_tokens,
        "temperature": 0,
    }


def _refusal(response: httpx.Response) -> tuple[str, str]:
    """The kind of an answer without a stream, and its message."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    word = "refused" if response.status_code in (404, 429, 503) else "error"
    return f"{word} {response.status_code}", message


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
