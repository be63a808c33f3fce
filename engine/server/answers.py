"""Answers of the OpenAI API as structures, with fields in its order."""

from typing import Any

import msgspec

from engine.server.messages import LedgerLine


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_prompt: int, num_generated: int) -> "Usage":
        return cls(num_prompt, num_generated, num_prompt + num_generated)


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatAnswer(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists over tokens; None where nothing comes before a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class CompletionAnswer(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"


class ModelCard(msgspec.Struct, frozen=True):
    """`root`: the directory; `parent`: the base of an adapter; `ready`: its weights are in the
    pool.
    """

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    ready: bool
    pinned: bool
    object: str = "model"
    permission: list[Any] = []


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class MemoryAnswer(msgspec.Struct, frozen=True):
    """GET /v1/memory: the ledger, and what the KV pool got of the budget."""

    device: str
    dtype: str
    ledger: list[LedgerLine]
    kv_bytes: int
    budget_bytes: int
    total_bytes: int
    num_kv_tokens: int
    num_kv_tokens_used: int


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str
