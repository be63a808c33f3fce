"""The page in headless Chromium, against a server with SmolLM2 and its demo adapters.

Run with `-m browser`; needs the extra `browser` and a Chromium. Takes the screenshots of docs/.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from tiny_server import running_server, tiny_server

Page = Any

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
DEMO = ROOT / "engine" / "lora" / "demo"
PROMPT = "Where does the wind come from?"
HOSTILE = "<img src=x onerror=alert(1)>&quot;"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_server("lora=demo", f"server.adapter_roots=[{DEMO}]") as url:
        yield url


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    """Fails the test if the page complains or asks anybody else for anything."""
    opened = chromium.new_page(viewport={"width": 1100, "height": 900})
    complaints: list[str] = []
    asked: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
    opened.on("request", lambda request: asked.append(request.url))
    yield opened
    opened.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("http://127.0.0.1:", "data:"))] == []


def expect(locator: Any) -> Any:
    """Playwright's assertions, which wait; the module is there where these tests run."""
    from playwright.sync_api import expect as expected

    return expected(locator)


def open_page(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#state")).to_have_text("ready")
    page.locator("#models input").first.wait_for()


def choose(page: Page, *names: str) -> None:
    for box in page.locator("#models input").all():
        box.set_checked(box.get_attribute("value") in names)


def stream(page: Page, *names: str, num_tokens: int = NUM_TOKENS) -> None:
    choose(page, *names)
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_label("Tokens", exact=True).fill(str(num_tokens))
    page.get_by_role("button", name="Stream").click()


def models(url: str) -> list[str]:
    return [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]


def test_the_memory_plan_fills_the_budget(page: Page, server: str) -> None:
    open_page(page, server)
    memory = httpx.get(f"{server}/v1/memory").json()
    rows = [row.split("\t") for row in page.locator("#memory-legend").inner_text().splitlines()]
    assert [row[0] for row in rows][:2] == [line["owner"] for line in memory["ledger"]][:2]
    assert "KV pages" in [row[0] for row in rows]
    assert sum(float(row[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.5)
    bar = page.locator("#memory-bar").bounding_box()
    widths = [part.bounding_box()["width"] for part in page.locator("#memory-bar > div").all()]
    assert len(widths) == len(rows) and sum(widths) == pytest.approx(bar["width"], abs=4)


def test_adapters_are_loaded_and_unloaded_and_hostile_names_are_text(
    page: Page, server: str
) -> None:
    open_page(page, server)
    page.get_by_label("Name").fill(HOSTILE)
    page.get_by_label("Directory on the server").fill(str(DEMO / "pirate"))
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.locator("#adapters-message")).to_contain_text("added successfully")
    assert HOSTILE in models(server)
    expect(page.locator("#adapters")).to_contain_text(HOSTILE)
    stream(page, HOSTILE, num_tokens=2)
    expect(page.locator("#ask-message")).to_have_text("Done.")
    assert page.locator(".answer h3").inner_text() == HOSTILE
    assert page.locator("img").count() == 0
    page.get_by_role("button", name=f"Unload {HOSTILE}").click()
    expect(page.locator("#adapters")).not_to_contain_text(HOSTILE)
    assert HOSTILE not in models(server)


def test_a_refused_load_says_why(page: Page, server: str) -> None:
    open_page(page, server)
    page.get_by_label("Name").fill("x")
    page.get_by_label("Directory on the server").fill("/etc")
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.locator("#adapters-message")).to_contain_text("server.adapter_roots")


def test_adapters_answer_side_by_side_as_they_do_alone(page: Page, server: str) -> None:
    names = [models(server)[0], "pirate", "shout"]
    open_page(page, server)
    stream(page, *names)
    expect(page.locator("#ask-message")).to_have_text("Done.", timeout=60_000)
    shown = {
        column.locator("h3").inner_text(): column.locator("pre").text_content()
        for column in page.locator(".answer").all()
    }
    for name in names:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
        }
        answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
        assert shown[name] == answer.json()["choices"][0]["message"]["content"], name
    assert len(set(shown.values())) == 3
    expect(page.locator(".answer p").first).to_contain_text(f"{NUM_TOKENS} tokens")
    page.locator("#playground").screenshot(path=ROOT / "docs" / "playground.png")


def test_stop_ends_the_requests(page: Page, server: str) -> None:
    open_page(page, server)
    stream(page, *models(server)[:1], "shout", num_tokens=1000)
    expect(page.locator("#numbers")).to_contain_text("Running2")
    page.wait_for_timeout(4000)  # some tokens for the picture
    page.screenshot(path=ROOT / "docs" / "page.png", full_page=True)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer p").last).to_have_text("stopped")
    expect(page.locator("#numbers")).to_contain_text("Running0")


def test_dark_and_light(page: Page, server: str) -> None:
    open_page(page, server)

    def background() -> str:
        color: str = page.locator("body").evaluate("node => getComputedStyle(node).backgroundColor")
        return color

    page.emulate_media(color_scheme="light")
    light = background()
    page.emulate_media(color_scheme="dark")
    assert background() != light


def test_keys_are_asked_for_and_kept_nowhere(page: Page, tmp_path: Path) -> None:
    for kind in ("user", "admin"):
        (tmp_path / kind).write_text(f"{kind}-key\n")
    files = f"server.api_keys_file={tmp_path}/user", f"server.admin_keys_file={tmp_path}/admin"
    with tiny_server(0, *files) as url:
        page.goto(url)
        expect(page.locator("#state")).to_contain_text("an API key is needed")
        page.get_by_label("API key").fill("user-key")
        expect(page.locator("#state")).to_have_text("ready")
        page.get_by_label("Name").fill("x")
        page.get_by_label("Directory on the server").fill("x")
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.locator("#adapters-message")).to_contain_text("an API key is needed")
        page.get_by_label("Admin key").fill("admin-key")
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.locator("#adapters-message")).to_contain_text("no adapter directory")
        kept = page.evaluate(
            "() => JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        )
        assert "-key" not in kept
        page.reload()
        expect(page.locator("#state")).to_contain_text("an API key is needed")
