"""The official client: log-probabilities, usage, names, refusals, adapters at run time."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from front_support import BASE, LOADED, offline_engine
from openai_cases import BAD_CHATS, BAD_COMPLETIONS, CHAT, HARMLESS, PROMPT, SCHEMA
from openai_server import resolving_server

from engine.serving.engine import Engine


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


# ---------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("adapter", [None, "rank1"])
def test_completion_logprobs(
    ai: openai.OpenAI, offline: Engine, adapter: str | None, stream: bool
) -> None:
    params = offline.sampling_params(max_tokens=6, logprobs=3)
    [wanted] = offline.generate([PROMPT], params, adapter)
    answer = ai.completions.create(
        model=adapter or BASE, prompt=PROMPT, max_tokens=6, logprobs=3, stream=stream
    )
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for chunk in answer if stream else [answer]:  # type: ignore[union-attr]
        found = chunk.choices[0].logprobs
        assert found is not None
        tokens += found.tokens or []
        values += found.token_logprobs or []
        tops += found.top_logprobs or []
        offsets += found.text_offset or []
    assert values == pytest.approx([one.logprob for one in wanted.logprobs], abs=1e-4)
    text = [offline.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in wanted.token_ids]
    assert tokens == text
    assert offsets == [sum(map(len, text[:index])) for index in range(6)]
    for top, token, value in zip(tops, tokens, values, strict=True):
        assert top is not None and 1 <= len(top) <= 4
        assert top[token] == pytest.approx(value)
        assert max(top.values()) == pytest.approx(value, abs=1e-4)  # greedy takes the likeliest


@pytest.mark.parametrize("top", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(ai: openai.OpenAI, offline: Engine, top: int | None, stream: bool) -> None:
    prompt = offline.tokenizer.encode(offline.tokenizer.render_chat(CHAT))
    params = offline.sampling_params(max_tokens=5, logprobs=top or 0)
    [wanted] = offline.generate([prompt], params)
    given = {} if top is None else {"top_logprobs": top}
    answer = ai.chat.completions.create(
        model=BASE,
        messages=CHAT,
        max_tokens=5,
        logprobs=True,
        stream=stream,
        **given,  # type: ignore
    )
    entries = []
    for chunk in answer if stream else [answer]:
        if chunk.choices[0].logprobs is not None:
            entries += chunk.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(
        [one.logprob for one in wanted.logprobs], abs=1e-4
    )
    for entry, token_id in zip(entries, wanted.token_ids, strict=True):
        assert bytes(entry.bytes) == offline.tokenizer.token_bytes(token_id)
        assert len(entry.top_logprobs) == (top or 0)


def test_without_logprobs_there_are_none(ai: openai.OpenAI) -> None:
    assert ai.completions.create(model=BASE, prompt="a").choices[0].logprobs is None
    chat = ai.chat.completions.create(model=BASE, messages=CHAT, max_tokens=2)  # type: ignore
    assert chat.choices[0].logprobs is None


@pytest.mark.parametrize("prompt", ["the quick", PROMPT], ids=["text", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(
    ai: openai.OpenAI, offline: Engine, prompt: Any, stream: bool
) -> None:
    text = prompt if isinstance(prompt, str) else offline.tokenizer.decode(prompt, False)
    [wanted] = offline.generate([prompt], offline.sampling_params(max_tokens=4))
    answer = ai.completions.create(
        model=BASE, prompt=prompt, max_tokens=4, echo=True, n=2, temperature=0, stream=stream
    )
    texts = ["", ""]
    for chunk in answer if stream else [answer]:  # type: ignore[union-attr]
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [text + wanted.text] * 2


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(
    ai: openai.OpenAI, offline: Engine, max_tokens: int, stream: bool
) -> None:
    """What lm-eval asks for: with max_tokens 0 nothing but the prompt comes back."""
    params = offline.sampling_params(max_tokens=max_tokens or 1, logprobs=1, prompt_logprobs=1)
    [wanted] = offline.generate([PROMPT], params, "pattern")
    answer = ai.completions.create(
        model="pattern",
        prompt=PROMPT,
        max_tokens=max_tokens,
        echo=True,
        logprobs=1,
        stream=stream,
    )
    values: list[float | None] = []
    tokens: list[str] = []
    text, reason = "", None
    for chunk in answer if stream else [answer]:  # type: ignore[union-attr]
        choice = chunk.choices[0]
        values += choice.logprobs.token_logprobs
        tokens += choice.logprobs.tokens
        text += choice.text
        reason = choice.finish_reason or reason
    scores = [one.logprob for one in wanted.prompt_logprobs if one is not None]
    answered = [one.logprob for one in wanted.logprobs[:max_tokens]]
    assert values[0] is None and values[1:] == pytest.approx(scores + answered, abs=1e-4)
    assert len(tokens) == len(PROMPT) + max_tokens and reason == "length"
    shown = offline.tokenizer.decode(PROMPT, False) + (wanted.text if max_tokens else "")
    assert text == shown
    if not stream:
        assert answer.usage.completion_tokens == max_tokens  # type: ignore[union-attr]


# ---------------------------------------------------------------------- usage, forms, names


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_ends_with_its_usage_if_asked(
    ai: openai.OpenAI, offline: Engine, kind: str
) -> None:
    asked: Any = {"model": BASE, "max_tokens": 3, "n": 2, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    if kind == "chat":
        chunks = list(ai.chat.completions.create(**asked, messages=CHAT))
    else:
        chunks = list(ai.completions.create(**asked, prompt=[PROMPT, PROMPT]))
    *others, last = chunks
    assert last.choices == [] and all(chunk.usage is None for chunk in others)
    chat = offline.tokenizer.encode(offline.tokenizer.render_chat(CHAT))
    num_prompt, num_samples = (len(chat), 2) if kind == "chat" else (6, 4)
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 3 * num_samples)
    assert usage.total_tokens == num_prompt + 3 * num_samples


def test_a_stream_has_no_usage_unless_asked(ai: openai.OpenAI) -> None:
    chunks = list(ai.completions.create(model=BASE, prompt="a", stream=True))
    assert all(chunk.choices for chunk in chunks)


def test_structured_chat_streams_what_its_schema_allows(ai: openai.OpenAI) -> None:
    stream = ai.chat.completions.create(
        model="rank1",
        messages=CHAT,  # type: ignore[arg-type]
        response_format=SCHEMA,  # type: ignore[arg-type]
        max_tokens=60,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)  # type: ignore
    assert text.startswith('{"ship":')


@pytest.mark.parametrize("model", [BASE, "rank1", f"{BASE}:rank1", "lazy", f"{BASE}:lazy"])
def test_answers_repeat_the_name_that_was_asked_for(ai: openai.OpenAI, model: str) -> None:
    assert ai.completions.create(model=model, prompt="a").model == model
    stream = ai.chat.completions.create(
        model=model,
        messages=CHAT,
        max_tokens=2,
        stream=True,  # type: ignore[arg-type]
    )
    assert {chunk.model for chunk in stream} == {model}  # type: ignore[union-attr]


def test_base_and_adapter_differ_and_both_names_of_one_agree(ai: openai.OpenAI) -> None:
    texts = {
        model: ai.completions.create(model=model, prompt=PROMPT, max_tokens=8).choices[0].text
        for model in (BASE, "rank1", f"{BASE}:rank1", "pattern")
    }
    assert texts["rank1"] == texts[f"{BASE}:rank1"]
    assert len({texts[BASE], texts["rank1"], texts["pattern"]}) == 3


def test_models_lists_base_then_adapters(ai: openai.OpenAI) -> None:
    base, *others = ai.models.list().data
    assert base.id == BASE and base.to_dict()["parent"] is None
    cards = {card.id: card.to_dict() for card in others}
    for name in LOADED:
        assert cards[name]["parent"] == BASE and cards[name]["ready"] is True
        assert str(cards[name]["root"]).endswith("/adapter")
        assert cards[name]["max_model_len"] == 512 and cards[name]["owned_by"] == "lora-engine"
    assert ai.models.retrieve("rank1").id == "rank1"
    assert ai.models.retrieve(BASE).id == BASE
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ai.models.retrieve("nobody")


@pytest.mark.parametrize(
    "model", ["nobody", f"{BASE}:nobody", "", "Tiny", f"{BASE}:", "../rank1", "x" * 5000]
)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_models_are_never_the_base(ai: openai.OpenAI, model: str, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError, match=f"there are {BASE}, rank1") as refused:
        ai.completions.create(model=model, prompt="a", stream=stream)
    assert refused.value.code == "model_not_found" and refused.value.param == "model"
    assert len(str(refused.value)) < 600
    with pytest.raises(openai.NotFoundError):
        ai.chat.completions.create(model=model, messages=CHAT, stream=stream)  # type: ignore


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", sorted(BAD_COMPLETIONS))
def test_bad_completions(ai: openai.OpenAI, case: str, stream: bool) -> None:
    fields, reason = BAD_COMPLETIONS[case]
    if "stream_options" in fields and stream:
        return
    with pytest.raises(openai.BadRequestError) as refused:
        ai.completions.create(
            **{"model": BASE, "prompt": PROMPT, "max_tokens": 4, "stream": stream, **fields}
        )
    assert reason in str(refused.value) and refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("case", sorted(BAD_CHATS))
def test_bad_chats(ai: openai.OpenAI, case: str) -> None:
    fields, reason = BAD_CHATS[case]
    with pytest.raises(openai.BadRequestError) as refused:
        ai.chat.completions.create(**{"model": BASE, "messages": CHAT, "max_tokens": 4, **fields})
    assert reason in str(refused.value)


@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_harmless_fields_change_nothing(ai: openai.OpenAI, field: str) -> None:
    asked: Any = {"model": BASE, "messages": CHAT, "max_tokens": 6}
    plain = ai.chat.completions.create(**asked)
    other = ai.chat.completions.create(**asked, **{field: HARMLESS[field]})
    assert other.choices == plain.choices


def test_an_adapter_beside_an_adapter_is_refused(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="names an adapter itself"):
        ai.completions.create(model="rank1", prompt="a", extra_body={"adapter": {"pattern": 1.0}})
    with pytest.raises(openai.NotFoundError, match="'nobody' does not exist"):
        ai.completions.create(model=BASE, prompt="a", extra_body={"adapter": {"nobody": 1.0}})


def test_errors_carry_the_request_id(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ai.completions.create(
            model=BASE, prompt="a", temperature=-1, extra_headers={"x-request-id": "mine-7"}
        )
    assert refused.value.request_id == "mine-7"


# ---------------------------------------------------------------------- at run time


def test_an_adapter_is_loaded_used_replaced_and_unloaded(
    ai: openai.OpenAI, offline: Engine
) -> None:
    body = {"lora_name": "mine", "lora_path": "late"}
    done = ai.post("/load_lora_adapter", body=body, cast_to=str)
    assert done == "Success: LoRA adapter 'mine' added successfully."
    first = ai.completions.create(model="mine", prompt=PROMPT, max_tokens=8).choices[0].text
    with pytest.raises(openai.BadRequestError, match="has already been loaded"):
        ai.post("/load_lora_adapter", body=body, cast_to=str)
    other = body | {"lora_path": "lazy", "load_inplace": True}
    assert ai.post("/load_lora_adapter", body=other, cast_to=str) == done
    second = ai.completions.create(model="mine", prompt=PROMPT, max_tokens=8).choices[0].text
    [rank1] = offline.generate([PROMPT], offline.sampling_params(max_tokens=8), "rank1")
    assert second == rank1.text != first
    gone = ai.post("/unload_lora_adapter", body={"lora_name": "mine"}, cast_to=str)
    assert gone == "Success: LoRA adapter 'mine' removed successfully."
    with pytest.raises(openai.NotFoundError):
        ai.completions.create(model="mine", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError, match="'mine' cannot be found"):
        ai.post("/unload_lora_adapter", body={"lora_name": "mine"}, cast_to=str)


def test_a_broken_adapter_is_refused_with_its_reasons_by_name_and_by_path(
    ai: openai.OpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"adapter_model\.safetensors"):
        body = {"lora_name": "mine", "lora_path": "broken"}
        ai.post("/load_lora_adapter", body=body, cast_to=str)
    with pytest.raises(openai.BadRequestError, match="its adapter cannot be loaded"):
        ai.completions.create(model="broken", prompt="a")
    assert "broken" not in [card.id for card in ai.models.list().data]


def test_many_at_once_each_get_their_own_answer(url: str, offline: Engine) -> None:
    names = [None, *LOADED] * 8
    prompts = [[1, 267 + index] for index in range(len(names))]
    params = offline.sampling_params(max_tokens=8)
    wanted = [one.text for one in offline.generate(prompts, params, names)]

    async def ask(ai: openai.AsyncOpenAI, name: str | None, prompt: list[int]) -> str:
        stream = await ai.completions.create(
            model=name or BASE, prompt=prompt, max_tokens=8, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as ai:
            return await asyncio.gather(*(ask(ai, *one) for one in zip(names, prompts)))  # noqa: B905

    assert asyncio.run(run()) == wanted


def test_probabilities_are_probabilities(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(model=BASE, prompt=PROMPT, max_tokens=1, logprobs=20)
    top = answer.choices[0].logprobs.top_logprobs[0]  # type: ignore[union-attr, index]
    assert 0 < sum(math.exp(value) for value in top.values()) <= 1
