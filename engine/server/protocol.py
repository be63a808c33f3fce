"""Request bodies of the OpenAI API and its extensions by vLLM, decoded strictly.

A field that is not served is refused if it would change the answer, ignored if it would not; the
two sets stand here. Knows neither the engine nor HTTP.
"""

import difflib
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from engine.server.errors import ApiError, bad_request

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Fields that are not served, with the values that leave the answer as it is.
REFUSED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "logit_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
INSTEAD = {
    "guided_json": "response_format",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "structured_outputs": "response_format, regex or grammar",
    "functions": "tools",
    "function_call": "tool_choice",
    "best_of": "n",
    "prompt_logprobs": "echo with logprobs in /v1/completions",
    "allowed_token_ids": "regex or grammar",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
INT64 = (1 << 63) - 1

# What a message to the engine process can hold.
Integer = Annotated[int, Meta(ge=-INT64, le=INT64)]
Schema = dict[str, Any] | bool
TokenId = Annotated[int, Meta(ge=0, le=INT64)]
Prompts = str | list[str | TokenId | list[TokenId]]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct):
    schema: Schema
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both ways of asking have in common. `adapter`: names with weights, an extension."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    adapter: dict[str, float] | None = None
    priority: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Integer, float] | None = None
    bad_words: list[str] | None = None
    min_tokens: Integer | None = None
    max_tokens: Integer | None = None
    seed: Integer | None = None
    n: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of them."""

    prompt: Prompts
    logprobs: Integer | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter. `load_inplace` is vLLM's name of `replace`."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    replace: bool | None = None
    pinned: bool | None = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter. `lora_int_id` is taken for vLLM's sake and not used."""

    lora_name: str
    lora_int_id: Integer | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


_Body = TypeVar("_Body", bound=msgspec.Struct)
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """A body as `kind`. Raises ApiError that names the field and what it may be."""
    try:
        body.decode()
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _check_fields(fields, kind)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON in UTF-8: {error}") from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error


def _check_fields(fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> None:
    known = kind.__struct_fields__
    for name, raw in fields.items():
        if name in known or name in HARMLESS or bytes(raw) == b"null":
            continue
        if name not in REFUSED:
            close = difflib.get_close_matches(name[:64], known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise bad_request(f"{name[:64]!r} is no field of this request{hint}", param=name[:64])
        if msgspec.json.decode(raw) not in REFUSED[name]:
            raise _unserved(name)


def _unserved(name: str) -> ApiError:
    neutral = [msgspec.json.encode(value).decode() for value in REFUSED[name]]
    instead = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
    allowed = f"leave it out{''.join(f', or give {value}' for value in neutral)}"
    return bad_request(
        f"{name}: not served, and it would change the answer; {allowed}{instead}",
        param=name,
        code="unsupported_parameter",
    )


def _invalid(message: str) -> ApiError:
    """From msgspec's "Expected `int`, got `str` - at `$.n`"."""
    found = _PLACE.search(message)
    text = message[: found.start()] if found else message
    text = text.replace("`", "")
    place = found[1] if found else ""
    param = re.split(r"[.\[]", place)[0] or None
    return bad_request(f"{place}: {text}" if place else text, param=param)
