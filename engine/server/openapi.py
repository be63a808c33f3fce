"""GET /openapi.json: what the routes take and give, from the very structures that they use."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from engine import __version__
from engine.server import answers, protocol
from engine.server.errors import ErrorAnswer
from engine.server.exchange import Exchange
from engine.server.service import Service
from engine.server.sse import encode

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
BYTES = "application/octet-stream"
ANY: dict[str, Any] = {"type": "object"}
STRING: dict[str, Any] = {"type": "string"}
# method, path, what it is for, body, answer (None: plain text), statuses beside 200
OPERATIONS: tuple[tuple[str, str, str, Any, Any, tuple[int, ...]], ...] = (
    ("post", "/v1/chat/completions", "Answer a conversation", protocol.ChatBody,
     answers.ChatAnswer, (400, 401, 404, 408, 413, 429, 500, 503, 504)),
    ("post", "/v1/completions", "Continue prompts", protocol.CompletionBody,
     answers.CompletionAnswer, (400, 401, 404, 408, 413, 429, 500, 503, 504)),
    ("get", "/v1/models", "The base and all adapters", None, answers.ModelList, (401,)),
    ("get", "/v1/models/{model}", "One of them", None, answers.ModelCard, (401, 404)),
    ("post", "/v1/load_lora_adapter", "Load an adapter from a directory (admin)",
     protocol.LoadAdapterBody, None, (400, 401, 403, 404, 408, 413, 503)),
    ("post", "/v1/load_lora_adapter_from_tensors", "Load an adapter from a safetensors file whose "
     "metadata has its adapter_config.json as text under adapter_config (admin)", bytes, None,
     (400, 401, 403, 408, 413, 503)),
    ("post", "/v1/unload_lora_adapter", "Unload an adapter (admin)", protocol.UnloadAdapterBody,
     None, (400, 401, 403, 404, 408, 413, 503)),
    ("get", "/v1/memory", "The memory plan", None, answers.MemoryAnswer, (401,)),
    ("post", "/tokenize", "Token ids of a prompt or a conversation", protocol.TokenizeBody,
     answers.TokenizeAnswer, (400, 401, 404, 408, 413)),
    ("post", "/detokenize", "Text of token ids", protocol.DetokenizeBody,
     answers.DetokenizeAnswer, (400, 401, 404, 408, 413)),
    ("get", "/health", "Whether the engine lives and gets on", None, ANY, (503,)),
    ("get", "/ready", "Whether requests should be sent here", None, ANY, (503,)),
    ("get", "/metrics", "For Prometheus", None, None, ()),
    ("get", "/version", "The version", None, ANY, ()),
    ("get", "/openapi.json", "This document", None, ANY, ()),
)  # fmt: skip
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "/v1/models/{model}": [{"name": "model", "in": "path", "required": True, "schema": STRING}],
    "/v1/load_lora_adapter_from_tensors": [
        {"name": "lora_name", "in": "query", "required": True, "schema": STRING},
        {
            "name": "replace",
            "in": "query",
            "schema": {"type": "string", "enum": ["true", "false", "1", "0"]},
        },
    ],
}
STREAMED = frozenset({"/v1/chat/completions", "/v1/completions"})


async def document(service: Service, exchange: Exchange) -> None:
    await exchange.answer(_document())


@cache
def _document() -> bytes:
    structs = [kind for *_, body, answer, _ in OPERATIONS for kind in (body, answer) if _own(kind)]
    schemas, components = msgspec.json.schema_components(
        [*structs, ErrorAnswer], ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip([*structs, ErrorAnswer], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, body, answer, statuses in OPERATIONS:
        operation: dict[str, Any] = {
            "summary": summary,
            "parameters": PARAMETERS.get(path, []),
            "responses": {
                "200": {"description": "Success", "content": _answers(path, answer, schema_of)},
                **_refusals(statuses, schema_of[ErrorAnswer]),
            },
            "security": [{}, {"key": []}],
        }
        if body is not None:
            operation["requestBody"] = {"required": True, "content": _body(body, schema_of)}
        paths.setdefault(path, {})[method] = operation
    return encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "lora-engine", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _own(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _body(kind: Any, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if kind is bytes:
        return {BYTES: {"schema": {"type": "string", "format": "binary"}}}
    return {JSON: {"schema": schema_of[kind]}}


def _answers(path: str, kind: Any, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if kind is None:
        return {TEXT: {"schema": STRING}}
    schema = kind if isinstance(kind, dict) else schema_of[kind]
    streamed = {EVENTS: {"schema": STRING}} if path in STREAMED else {}
    return {JSON: {"schema": schema}, **streamed}


def _refusals(statuses: Sequence[int], schema: Any) -> dict[str, Any]:
    return {
        str(status): {
            "description": "Refused; the message says why",
            "content": {JSON: {"schema": schema}},
        }
        for status in statuses
    }
