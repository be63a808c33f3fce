"""Bodies: fields that are served, refused or ignored, and the document that tells of them."""

import json
from collections.abc import Iterator

import msgspec
import pytest
from front_support import Served, served_front

from engine.server.app import ROUTES
from engine.server.errors import ApiError
from engine.server.openapi import OPERATIONS
from engine.server.protocol import (
    HARMLESS,
    INSTEAD,
    REFUSED,
    ChatBody,
    CompletionBody,
    decode,
)

CHAT = {"model": "m", "messages": []}
COMPLETION = {"model": "m", "prompt": "a"}


def encoded(**fields: object) -> bytes:
    return json.dumps(COMPLETION | fields).encode()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    for kind, body in ((CompletionBody, COMPLETION), (ChatBody, CHAT)):
        with pytest.raises(ApiError, match=f"{name}: not served") as refused:
            decode(json.dumps(body | {name: {"some": "thing"}}).encode(), kind)
        assert refused.value.detail.param == name and refused.value.status == 400
        assert decode(json.dumps(body | {name: None}).encode(), kind).model == "m"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_values_that_change_nothing_are_taken(name: str) -> None:
    for value in REFUSED[name]:
        assert decode(encoded(**{name: value}), CompletionBody).prompt == "a"


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_changes_nothing_is_ignored(name: str) -> None:
    for value in (None, 1, "x", {"a": [1]}):
        assert decode(encoded(**{name: value}), CompletionBody).prompt == "a"


def test_no_field_is_in_two_sets() -> None:
    served = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}
    assert not served & HARMLESS and not served & set(REFUSED) and not HARMLESS & set(REFUSED)
    assert set(INSTEAD) <= set(REFUSED)


@pytest.mark.parametrize("field", ["temperature", "stop", "n", "logit_bias", "stream", "adapter"])
def test_null_is_as_good_as_leaving_out(field: str) -> None:
    assert getattr(decode(encoded(**{field: None}), CompletionBody), field) is None


def test_unknown_fields_are_refused_with_the_closest_name() -> None:
    with pytest.raises(ApiError, match=r"'max_token' is no field .*did you mean max_tokens"):
        decode(encoded(max_token=3), CompletionBody)
    with pytest.raises(ApiError, match="'echo' is no field"):
        decode(json.dumps(CHAT | {"echo": True}).encode(), ChatBody)
    with pytest.raises(ApiError, match=r"stream_options: .*include_usag"):
        decode(encoded(stream_options={"include_usag": True}), CompletionBody)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match="missing required field model"):
        decode(b'{"prompt": "a"}', CompletionBody)


# ---------------------------------------------------------------------- the document


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_front(tmp_path_factory.mktemp("document")) as made:
        yield made


def test_the_document_lists_every_route_and_resolves(server: Served) -> None:
    document = server.http.get("/openapi.json").json()
    routes = {(method.lower(), path.replace(":path", "")) for method, path, _ in ROUTES}
    assert {(method, path) for method, path, *_ in OPERATIONS} == routes
    assert {(m, path) for path, item in document["paths"].items() for m in item} == routes
    text = json.dumps(document)
    for name in set(__import__("re").findall(r"#/components/schemas/(\w+)", text)):
        assert name in document["components"]["schemas"]


def test_answers_match_the_document(server: Served) -> None:
    from jsonschema import Draft202012Validator

    document = server.http.get("/openapi.json").json()
    asked = {
        "/v1/models": server.http.get("/v1/models"),
        "/v1/memory": server.http.get("/v1/memory"),
        "/v1/completions": server.complete(logprobs=1, echo=True),
        "/tokenize": server.http.post("/tokenize", json={"prompt": "a", "return_token_strs": True}),
        "/detokenize": server.http.post("/detokenize", json={"tokens": [267]}),
    }
    for path, answer in asked.items():
        [item] = document["paths"][path].values()
        schema = item["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
        whole = {**schema, "components": document["components"]}
        Draft202012Validator(whole).validate(answer.json())


# ---------------------------------------------------------------------- tokens


def test_tokenize_and_back(server: Served) -> None:
    text = "the quick brown \u00e9\U0001f600"
    made = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 512
    back = server.http.post("/detokenize", json={"tokens": made["tokens"]}).json()
    assert back == {"prompt": text}


def test_tokenize_of_a_conversation_is_what_a_chat_gets(server: Served) -> None:
    messages = [{"role": "user", "content": "the quick"}]
    made = server.http.post("/tokenize", json={"model": "rank1", "messages": messages}).json()
    chat = server.http.post(
        "/v1/chat/completions", json={"model": "rank1", "messages": messages, "max_tokens": 3}
    ).json()
    assert made["count"] == chat["usage"]["prompt_tokens"]
    text = server.http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"]
    assert text == "<user>the quick<assistant>"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": []}, 400),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404),
        ("/detokenize", {"tokens": [512]}, 400),
        ("/detokenize", {"tokens": [2**63]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
def test_bad_token_requests(
    server: Served, path: str, body: dict[str, object], status: int
) -> None:
    answer = server.http.post(path, content=msgspec.json.encode(body))
    assert answer.status_code == status, answer.text
