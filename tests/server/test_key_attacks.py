"""Keys: none, a wrong one or a user's opens nothing more; no key stands in a log or an answer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from front_support import BASE, Served, served_front
from loguru import logger
from starlette.datastructures import Headers

from engine.config import ServerConfig
from engine.errors import ConfigError
from engine.server.auth import Access, Keys, access_of
from engine.server.errors import ApiError

USER_KEY, ADMIN_KEY, WRONG_KEY = "user-key-51", "admin-key-77", "wrong-key-99"


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_front(tmp_path_factory.mktemp("open"), resolve=True) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keyed")
    with served_front(folder, user_keys=[USER_KEY], admin_keys=[ADMIN_KEY]) as server:
        yield server


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="TRACE", diagnose=False)
    yield lines
    logger.remove(sink)


USER_ROUTES = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/memory"),
    ("GET", "/v1/stats"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/no/such/path"),
    ("GET", "//v1/models"),
    ("GET", "/V1/models"),
)
ADMIN_ROUTES = (
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/load_lora_adapter_from_tensors"),
    ("POST", "/v1/unload_lora_adapter"),
)
BAD_HEADERS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "wrong": [("authorization", f"Bearer {WRONG_KEY}")],
    "empty": [("authorization", "Bearer")],
    "no scheme": [("authorization", USER_KEY)],
    "basic": [("authorization", f"Basic {ADMIN_KEY}")],
    "prefix": [("authorization", f"Bearer {ADMIN_KEY[:-1]}")],
    "longer": [("authorization", f"Bearer {ADMIN_KEY}x")],
    "two words": [("authorization", f"Bearer {ADMIN_KEY} {ADMIN_KEY}")],
    "two headers": [
        ("authorization", f"Bearer {WRONG_KEY}"),
        ("authorization", f"Bearer {ADMIN_KEY}"),
    ],
    "upper case": [("authorization", f"Bearer {ADMIN_KEY.upper()}")],
    "another header": [("x-api-key", ADMIN_KEY)],
    "not ASCII": [("authorization", "Bearer \xe9\xff")],
}


@pytest.mark.parametrize("case", sorted(BAD_HEADERS))
@pytest.mark.parametrize(("method", "path"), USER_ROUTES + ADMIN_ROUTES)
def test_requests_without_a_good_key(keyed: Served, method: str, path: str, case: str) -> None:
    headers = [(name, value.encode("latin-1")) for name, value in BAD_HEADERS[case]]
    answer = keyed.http.request(method, path, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert not any(key in answer.text for key in (USER_KEY, ADMIN_KEY, WRONG_KEY))


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_user_keys_do_not_open_admin_routes(keyed: Served, method: str, path: str) -> None:
    answer = keyed.http.request(method, path, headers={"authorization": f"Bearer {USER_KEY}"})
    assert answer.status_code == 403 and USER_KEY not in answer.text
    opened = keyed.http.request(method, path, headers={"authorization": f"bearer {ADMIN_KEY}"})
    assert opened.status_code == 400  # let in; the body is empty


def test_both_kinds_of_keys_open_user_routes(keyed: Served) -> None:
    for key in (USER_KEY, ADMIN_KEY):
        headers = {"authorization": f"Bearer {key}"}
        assert keyed.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/openapi.json", "/metrics"])
def test_public_routes_need_no_key(keyed: Served, path: str) -> None:
    assert keyed.http.get(path).status_code == 200


def test_every_route_that_changes_something_is_an_admins() -> None:
    assert {path for _, path in ADMIN_ROUTES} == {
        path for path in ("/v1/load_lora_adapter", "/v1/load_lora_adapter_from_tensors",
                          "/v1/unload_lora_adapter", "/v1/models", "/")
        if access_of(path) is Access.admin
    }  # fmt: skip


def test_keys_stand_in_no_log(keyed: Served, logged: list[str]) -> None:
    for key in (USER_KEY, ADMIN_KEY, WRONG_KEY):
        headers = {"authorization": f"Bearer {key}", "x-request-id": "seen"}
        keyed.http.get("/v1/models", headers=headers)
        keyed.http.post("/v1/load_lora_adapter", headers=headers, content=b"{")
        keyed.http.post("/v1/completions", headers=headers, json={"model": BASE, "prompt": "a"})
    text = "".join(logged)
    assert "admitted" in text  # the sink sees what is logged
    assert not any(key in text for key in (USER_KEY, ADMIN_KEY, WRONG_KEY))


LOCAL_ONLY: dict[str, dict[str, str]] = {
    "another host": {"host": "evil.example"},
    "a host that begins well": {"host": "127.0.0.1.evil.example"},
    "another origin": {"origin": "http://evil.example"},
    "null origin": {"origin": "null"},
    "another port's origin": {"origin": "http://127.0.0.1:1"},
}


@pytest.mark.parametrize("case", sorted(LOCAL_ONLY))
def test_without_admin_keys_other_web_pages_are_refused(open_server: Served, case: str) -> None:
    body = {"lora_name": "mine", "lora_path": "lazy"}
    answer = open_server.http.post(
        "/v1/load_lora_adapter", headers=LOCAL_ONLY[case], content=json.dumps(body)
    )
    assert answer.status_code == 403 and "server.admin_keys_file" in answer.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "localhost.evil", "127.0.0.1"])
def test_without_admin_keys_only_a_loopback_server_has_admin_routes(host: str) -> None:
    keys = Keys.from_config(ServerConfig(host=host))
    headers = Headers({"host": "127.0.0.1:8000"})
    if host == "127.0.0.1":
        keys.check("/v1/load_lora_adapter", headers)
        return
    with pytest.raises(ApiError, match=r"server\.admin_keys_file"):
        keys.check("/v1/load_lora_adapter", headers)


KEY_FILES = {
    "missing": (None, "cannot be read"),
    "empty": ("", "has no key"),
    "blank": ("\n  \n", "has no key"),
    "two words": ("good\nsecret word\n", "line 2"),
    "long": ("k" * 513, "line 1"),
    "not ASCII": ("k\u00e9y", "is not ASCII"),
}


@pytest.mark.parametrize("knob", ["api_keys_file", "admin_keys_file"])
@pytest.mark.parametrize("case", sorted(KEY_FILES))
def test_bad_key_files_stop_the_start_and_are_not_shown(
    tmp_path: Path, case: str, knob: str
) -> None:
    text, reason = KEY_FILES[case]
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason) as refused:
        Keys.from_config(ServerConfig(**{knob: str(path)}))
    assert f"server.{knob}" in str(refused.value) and "secret" not in str(refused.value)
