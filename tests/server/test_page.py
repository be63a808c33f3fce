"""The page is served whole, loads nothing from elsewhere, and never takes text for markup."""

import asyncio
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import httpx
import msgspec
import pytest
from observed_client import STATS, ObservedClient
from starlette.applications import Starlette

from engine.config import ServerConfig
from engine.server import page
from engine.server.page import ASSETS, page_routes

ROOT = Path(__file__).parents[2]
FOLDER = Path(page.__file__).parent
TEXTS = {name: (FOLDER / name).read_text() for name in ASSETS}
SCRIPTS = sorted(name for name in ASSETS if name.endswith(".js"))


def get(path: str, *, enabled: bool = True) -> httpx.Response:
    routes = page_routes(ObservedClient("pirate"), ServerConfig(page=enabled))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Starlette(routes=routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path)

    return asyncio.run(ask())


@pytest.mark.parametrize("name", ASSETS)
def test_assets_are_served_under_a_policy_that_forbids_inline_scripts(name: str) -> None:
    answer = get("/" if name == "index.html" else f"/page/{name}")
    assert answer.status_code == 200 and answer.text == TEXTS[name]
    policy = dict(
        rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
    assert answer.headers["content-type"].startswith(types[name.rpartition(".")[2]])


def test_every_file_of_the_folder_is_served_and_shipped() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css")}
    assert files == set(ASSETS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["engine.server.page"]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in files)


@pytest.mark.parametrize("name", ASSETS)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    assert re.findall(r"\w+://|[\"'(]\s*//", TEXTS[name]) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_text_never_becomes_markup_or_code(name: str) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    assert re.findall(forbidden, TEXTS[name]) == []
    assert re.findall(r"localStorage|sessionStorage|document\.cookie", TEXTS[name]) == []


def test_markup_has_no_inline_scripts_or_styles() -> None:
    markup = TEXTS["index.html"]
    assert re.findall(r"\son\w+=|\sstyle=|javascript:|<style", markup) == []
    assert re.findall(r"<script(?![^>]*\ssrc=)", markup) == []


def test_scripts_import_what_is_served_and_find_what_is_there() -> None:
    ids = re.findall(r'\bid="([^"]+)"', TEXTS["index.html"])
    assert len(ids) == len(set(ids))
    for name in SCRIPTS:
        imported = re.findall(r'from "\./([^"]+)"', TEXTS[name])
        assert set(imported) <= set(ASSETS), name
        assert set(re.findall(r'\bfind\("([^"]+)"\)', TEXTS[name])) <= set(ids), name


def test_every_field_has_a_label() -> None:
    markup = TEXTS["index.html"]
    labelled = set(re.findall(r'<label for="([^"]+)"', markup))
    inside = "".join(re.findall(r"<label.*?</label>", markup, re.DOTALL))
    for field_id in re.findall(r'<(?:input|select|textarea) id="([^"]+)"', markup):
        assert field_id in labelled or f'id="{field_id}"' in inside, field_id


def test_the_numbers() -> None:
    answer = get("/v1/stats", enabled=False)
    assert answer.headers["cache-control"] == "no-store"
    found = answer.json()
    assert found["state"] == "ready" and found["num_restarts"] == 1
    assert found["stats"] == msgspec.to_builtins(STATS)
    assert [own["name"] for own in found["adapters"]] == ["pirate"]
    assert found["info"]["device"] == "cpu"


def test_the_page_can_be_turned_off() -> None:
    assert get("/", enabled=False).status_code == 404
    assert get("/page/app.js", enabled=False).status_code == 404
