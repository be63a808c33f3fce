"""Prompts of bodies as token ids: conversations through the template, texts through the tokenizer.

Long texts are worked on in threads, so that streams go on. Content is text only.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from engine.server.errors import bad_request
from engine.server.protocol import ROLES, ContentPart, Message, Prompts, ToolCall
from engine.text.tokenizer import Tokenizer

RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})
MAX_SHOWN_CHARS = 40


class Conversation(Protocol):
    """The fields of a body that become its prompt."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    chat_template_kwargs: dict[str, Any] | None

    @property
    def messages(self) -> Sequence[Message] | None: ...


async def chat_ids(tokenizer: Tokenizer, body: Conversation, *, tools: bool = True) -> list[int]:
    """Token ids of a conversation; the template sees its tools if `tools`. Raises ApiError,
    RequestError.
    """
    messages = [_message(index, message) for index, message in enumerate(body.messages or ())]
    variables = dict(body.chat_template_kwargs or {})
    if taken := RESERVED & variables.keys():
        raise bad_request(
            f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set there",
            param="chat_template_kwargs",
        )
    if not messages:
        raise bad_request("messages: is empty; give at least one", param="messages")
    if tools and body.tools:
        variables["tools"] = body.tools
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return await asyncio.to_thread(
        lambda: tokenizer.encode(tokenizer.render_chat(messages, **variables))
    )


async def prompts_ids(
    tokenizer: Tokenizer, prompts: Prompts, vocab_size: int, *, special: bool
) -> list[list[int]]:
    """Token ids of each prompt; `special` adds what the tokenizer adds to plain prompts. Raises
    ApiError, RequestError.
    """
    many = separate(prompts)
    texts = [prompt for prompt in many if isinstance(prompt, str)]
    if len(texts) == len(many):
        return await text_ids(tokenizer, texts, special=special)
    found = [prompt for prompt in many if not isinstance(prompt, str)]
    for ids in found:
        check_token_ids("prompt", ids, vocab_size)
    return found


async def text_ids(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Token ids of texts."""
    return await asyncio.to_thread(
        lambda: [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    )


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ApiError unless all are of the vocabulary."""
    outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if outside:
        raise bad_request(
            f"{field}: token id {str(outside[0])[:MAX_SHOWN_CHARS]} is outside the vocabulary of "
            f"0 to {vocab_size - 1}",
            param=field,
        )


def check_prompt_length(prompts: Sequence[Sequence[int]], limit: int | None) -> None:
    """Raise ApiError if a prompt is longer than `server.max_prompt_tokens`."""
    longest = max(map(len, prompts))
    if limit is not None and longest > limit:
        raise bad_request(
            f"the prompt has {longest} tokens, allowed are {limit} (server.max_prompt_tokens); "
            "shorten it",
            code="context_length_exceeded",
        )


def separate(prompts: Prompts) -> list[str] | list[list[int]]:
    """One prompt or several, all of a kind."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    texts = [item for item in prompts if isinstance(item, str)]
    if texts and len(texts) == len(prompts):
        return texts
    lists = [item for item in prompts if isinstance(item, list)]
    if lists and len(lists) == len(prompts):
        return lists
    raise bad_request(
        "prompt: is empty or mixes texts, token ids and lists of them; give one kind",
        param="prompt",
    )


def _message(index: int, message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    place = f"messages[{index}]"
    if message.role not in ROLES:
        raise bad_request(
            f"{place}.role: got {message.role[:MAX_SHOWN_CHARS]!r}, allowed are {', '.join(ROLES)}",
            param="messages",
        )
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": _content(place, message.content)}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [_tool_call(place, call) for call in message.tool_calls]
    return found


def _content(place: str, content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise bad_request(
                f"{place}.content: got a part of type {part.type[:MAX_SHOWN_CHARS]!r}, this model "
                "takes parts of type text only",
                param="messages",
            )
    return "\n".join(part.text or "" for part in content)


def _tool_call(place: str, call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments themselves: they get the object, not its text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise bad_request(
                f"{place}.tool_calls: the arguments of {call.function.name[:MAX_SHOWN_CHARS]!r} "
                f"are no JSON object ({error})",
                param="messages",
            ) from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
