"""The front end over an engine of this process, for tests that need faults or a look inside; and
the same engine offline. A tiny model with a chat template, two adapters, two more in a root.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from conftest import DATA, tiny_config
from fake_client import FakeClient, adapter_copy, chat_model, served

from engine import wiring
from engine.config import SamplingConfig, ServerConfig
from engine.server.app import build_app
from engine.server.auth import Keys
from engine.server.front import FrontEnd
from engine.server.observer import Observer
from engine.server.paths import AdapterRoots
from engine.serving.engine import Engine

BASE = "tiny"
LOADED = {"rank1": "c16_rank_1", "pattern": "c05_rank_alpha_pattern"}
IN_ROOT = {"lazy": "c16_rank_1", "late": "c22_q_only_gqa", "broken": "c47_truncated_file"}


def make_model(folder: Path) -> Path:
    """The model's directory."""
    return chat_model(DATA / "bases" / "llama", folder)


def make_root(folder: Path) -> Path:
    """A directory for `server.adapter_roots`."""
    root = folder / "adapters"
    root.mkdir()
    for name, case in IN_ROOT.items():
        adapter_copy(DATA / "cases" / case, root, name)
    return root


@contextmanager
def offline_engine(folder: Path) -> Iterator[Engine]:
    """An engine with the model and the loaded adapters."""
    adapters = {name: str(DATA / "cases" / case / "adapter") for name, case in LOADED.items()}
    container = wiring.build(tiny_config(make_model(folder), lora={"adapters": adapters}))
    yield container.engine()
    container.reset_singletons()


@dataclass(frozen=True)
class Served:
    """A server with its client, and what it is asked through."""

    client: FakeClient
    url: str
    http: httpx.Client
    root: Path

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": BASE, "prompt": [1, 267, 334], "max_tokens": 4} | fields
        return self.http.post("/v1/completions", json=body)

    def load(self, name: str, path: str, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path} | fields
        return self.http.post("/v1/load_lora_adapter", json=body)


@contextmanager
def served_front(
    folder: Path,
    *,
    user_keys: list[str] | None = None,
    admin_keys: list[str] | None = None,
    resolve: bool = False,
    observer: Observer | None = None,
    roots: bool = True,
    **changes: Any,
) -> Iterator[Served]:
    """A running server; `changes` are of ServerConfig."""
    with offline_engine(folder) as engine:
        root = make_root(folder)
        names = [str(root)] if roots else []
        cfg = ServerConfig(adapter_roots=names, **changes)
        keys = Keys(user_keys, admin_keys, loopback=cfg.host == "127.0.0.1")
        tokenizer, defaults = engine.tokenizer, SamplingConfig()
        front = FrontEnd(tokenizer, BASE, defaults, keys, AdapterRoots(names), resolve)
        client = FakeClient(engine)
        with (
            served(build_app(client, cfg, front, observer), client) as url,
            httpx.Client(base_url=url, timeout=30) as http,
        ):
            yield Served(client, url, http, root)
