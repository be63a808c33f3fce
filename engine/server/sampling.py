"""From the fields of a body to sampling parameters: the API's names and defaults become the
engine's.

Ranges are the engine's own to check; what needs the prompt's length comes in as a number.
"""

from dataclasses import fields
from typing import Any

import msgspec

from engine.config import SamplingConfig, ServerConfig
from engine.runtime.sampling_params import SamplingParams
from engine.server.errors import bad_request
from engine.server.protocol import GenerationBody, ResponseFormat

# Fields that mean the same in the API and in the engine.
SAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "regex",
    "grammar",
)
ANY_OBJECT = '{"type":"object"}'


def overrides(
    body: GenerationBody, cfg: ServerConfig, *, max_tokens: int, logprobs: int | None
) -> dict[str, Any]:
    """What a body sets, by the engine's field names. Raises ApiError."""
    found = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.n is not None and body.n > cfg.max_n:
        raise bad_request(
            f"n: got {body.n}, allowed is a whole number from 1 to {cfg.max_n} (server.max_n)",
            param="n",
        )
    if body.top_k is not None:
        found["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM's way to turn it off
    if logprobs is not None:
        found["logprobs"] = logprobs
    if body.response_format is not None:
        found |= _structure(body.response_format)
    return found | {"max_tokens": max_tokens}


def checked(values: dict[str, Any], defaults: SamplingConfig) -> SamplingParams:
    """The parameters as the engine will see them. Raises RequestError."""
    return SamplingParams.from_config(defaults, **values)


def complete(values: dict[str, Any], defaults: SamplingConfig) -> dict[str, Any]:
    """`values` and those configured defaults that are not SamplingParams' own."""
    own = SamplingParams()
    configured = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    return {k: v for k, v in configured.items() if v != getattr(own, k)} | values


def _structure(wanted: ResponseFormat) -> dict[str, str]:
    match wanted.type:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema" if wanted.json_schema is not None:
            return {"json_schema": msgspec.json.encode(wanted.json_schema.schema).decode()}
        case "json_schema":
            raise bad_request(
                "response_format.json_schema: is missing; give {'name': ..., 'schema': ...}",
                param="response_format",
            )
    raise bad_request(
        f"response_format.type: got {wanted.type[:80]!r}, allowed are text, json_object and "
        "json_schema",
        param="response_format",
    )
