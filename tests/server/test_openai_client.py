"""The official client against a real server process: answers equal the offline engine's, refusals
are the client's own error classes with a reason.
"""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from front_support import BASE, LOADED, offline_engine
from openai_cases import (
    CHAT,
    EXTRA_ANSWERS,
    PROMPT,
    SAME_ANSWERS,
    SHIP,
)
from openai_server import resolving_server

from engine.serving.engine import Engine
from engine.serving.output import Completion


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with offline_engine(tmp_path_factory.mktemp("offline")) as engine:
        yield engine


@pytest.fixture(scope="module")
def url() -> str:
    return resolving_server().url


@pytest.fixture(scope="module")
def ai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


def expected(
    engine: Engine, prompt: Any, fields: dict[str, Any], adapter: Any = None
) -> list[Completion]:
    params = engine.sampling_params(**{"max_tokens": 8, **fields})
    return engine.generate([prompt], params, adapter)


def chat_prompt(engine: Engine, messages: Any = CHAT, **variables: Any) -> list[int]:
    return engine.tokenizer.encode(engine.tokenizer.render_chat(messages, **variables))


def same(choice: Any, own: Completion) -> bool:
    text = choice.message.content if hasattr(choice, "message") else choice.text
    return bool(
        (choice.index, text, choice.finish_reason) == (own.index, own.text, own.finish_reason.value)
    )


# ---------------------------------------------------------------------- the offline engine's


@pytest.mark.parametrize("adapter", [None, *LOADED])
@pytest.mark.parametrize("case", sorted(SAME_ANSWERS))
def test_completions_equal_the_offline_engine(
    ai: openai.OpenAI, offline: Engine, case: str, adapter: str | None
) -> None:
    fields, own = SAME_ANSWERS[case]
    answer = ai.completions.create(
        **{"model": adapter or BASE, "prompt": PROMPT, "max_tokens": 8, **fields}
    )
    wanted = expected(offline, PROMPT, own, adapter)
    assert len(answer.choices) == len(wanted)
    assert all(same(*pair) for pair in zip(answer.choices, wanted, strict=True))
    assert answer.model == (adapter or BASE) and answer.object == "text_completion"
    num_tokens = sum(len(one.token_ids) for one in wanted)
    assert answer.usage is not None and answer.usage.completion_tokens == num_tokens
    assert answer.usage.prompt_tokens == 3 and answer.usage.total_tokens == 3 + num_tokens


@pytest.mark.parametrize("case", sorted(EXTRA_ANSWERS))
def test_extensions_equal_the_offline_engine(ai: openai.OpenAI, offline: Engine, case: str) -> None:
    fields, own = EXTRA_ANSWERS[case]
    max_tokens = fields.get("max_tokens", 8)
    answer = ai.completions.create(
        model=BASE, prompt=PROMPT, max_tokens=max_tokens, extra_body=fields
    )
    [wanted] = expected(offline, PROMPT, own, fields.get("adapter"))
    assert same(answer.choices[0], wanted)


@pytest.mark.parametrize("adapter", [None, *LOADED])
@pytest.mark.parametrize("case", ["greedy", "drawn", "stop", "n"])
def test_chats_equal_the_offline_engine(
    ai: openai.OpenAI, offline: Engine, case: str, adapter: str | None
) -> None:
    fields, own = SAME_ANSWERS[case]
    answer = ai.chat.completions.create(
        **{"model": adapter or BASE, "messages": CHAT, "max_tokens": 8, **fields}
    )
    wanted = expected(offline, chat_prompt(offline), own, adapter)
    assert all(same(*pair) for pair in zip(answer.choices, wanted, strict=True))
    assert {choice.message.role for choice in answer.choices} == {"assistant"}


@pytest.mark.parametrize("case", sorted(SAME_ANSWERS))
def test_streamed_completions_equal_the_offline_engine(
    ai: openai.OpenAI, offline: Engine, case: str
) -> None:
    fields, own = SAME_ANSWERS[case]
    wanted = expected(offline, PROMPT, own)
    texts, reasons = [""] * len(wanted), [""] * len(wanted)
    stream = ai.completions.create(
        **{"model": BASE, "prompt": PROMPT, "max_tokens": 8, "stream": True, **fields}
    )
    for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [one.text for one in wanted]
    assert reasons == [one.finish_reason.value for one in wanted]


@pytest.mark.parametrize("case", ["greedy", "n", "stop"])
def test_streamed_chats_begin_with_the_role_and_equal_the_offline_engine(
    ai: openai.OpenAI, offline: Engine, case: str
) -> None:
    fields, own = SAME_ANSWERS[case]
    wanted = expected(offline, chat_prompt(offline), own, "rank1")
    texts: list[list[str]] = [[] for _ in wanted]
    ended = set()
    for chunk in ai.chat.completions.create(
        **{"model": "rank1", "messages": CHAT, "max_tokens": 8, "stream": True, **fields}
    ):
        [choice] = chunk.choices
        assert (choice.delta.role == "assistant") == (not texts[choice.index])
        assert choice.index not in ended
        texts[choice.index].append(choice.delta.content or "")
        if choice.finish_reason:
            ended.add(choice.index)
    assert ["".join(parts) for parts in texts] == [one.text for one in wanted]
    assert len(ended) == len(wanted)


# ---------------------------------------------------------------------- prompts and conversations


@pytest.mark.parametrize(
    "prompts", [["the quick", "brown fox"], [[1, 267], [334, 339, 326]]], ids=["texts", "ids"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_batches_number_choices_by_prompt_then_sample(
    ai: openai.OpenAI, offline: Engine, prompts: Any, stream: bool
) -> None:
    drawn = {"n": 2, "temperature": 1.0, "seed": 4}
    wanted = [one for prompt in prompts for one in expected(offline, prompt, drawn)]
    answer = ai.completions.create(
        model=BASE,
        prompt=prompts,
        max_tokens=8,
        stream=stream,
        **drawn,  # type: ignore[call-overload]
    )
    texts = [""] * 4
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in wanted]


def test_parts_names_and_developers_reach_the_template(ai: openai.OpenAI, offline: Engine) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    answer = ai.chat.completions.create(
        model=BASE,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts},  # type: ignore[typeddict-item]
        ],
        max_completion_tokens=5,
    )
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the\nfox"},
    ]
    [wanted] = expected(offline, chat_prompt(offline, plain), {"max_tokens": 5})
    assert same(answer.choices[0], wanted)


TOOL = {"type": "function", "function": {"name": "find", "parameters": SHIP}}


@pytest.mark.parametrize(("choice", "shown"), [(None, True), ("auto", True), ("none", False)])
def test_tools_are_shown_to_the_template(
    ai: openai.OpenAI, offline: Engine, choice: str | None, shown: bool
) -> None:
    given = {} if choice is None else {"tool_choice": choice}
    answer = ai.chat.completions.create(
        model=BASE,
        messages=CHAT,
        tools=[TOOL],
        max_tokens=6,
        **given,  # type: ignore[call-overload]
    )
    prompt = chat_prompt(offline, tools=[TOOL] if shown else None)
    assert same(answer.choices[0], expected(offline, prompt, {"max_tokens": 6})[0])


def test_template_variables_and_past_tool_calls(ai: openai.OpenAI, offline: Engine) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "fox"}'}}
    messages: Any = [{"role": "assistant", "tool_calls": [call]}]
    answer = ai.chat.completions.create(
        model=BASE,
        messages=messages,
        max_tokens=6,
        extra_body={"chat_template_kwargs": {"mood": "glad"}, "add_generation_prompt": False},
    )
    [wanted] = expected(
        offline, offline.tokenizer.encode("<assistant>fox(glad)"), {"max_tokens": 6}
    )
    assert same(answer.choices[0], wanted)


def test_a_chat_without_max_tokens_may_fill_the_model(ai: openai.OpenAI, offline: Engine) -> None:
    answer = ai.chat.completions.create(
        model=BASE, messages=CHAT, extra_body={"ignore_eos": True}, timeout=60
    )
    assert answer.usage is not None and answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"
