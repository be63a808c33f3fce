"""An EngineClient over an engine of this process, with faults on demand, and a real HTTP server
around the app, on a thread.
"""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import uvicorn
from starlette.types import ASGIApp

from engine.errors import AdapterError
from engine.lora.ref import LoRARef
from engine.server.client import EngineClient, EngineState
from engine.server.messages import (
    AdapterInfo,
    EngineInfo,
    EngineStats,
    LedgerLine,
    Logprobs,
    TokenDelta,
)
from engine.serving.async_engine import AsyncEngine
from engine.serving.engine import Engine
from engine.serving.output import TokenEvent

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments.x }}{% endif %}{% endfor %}"
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% if mood is defined %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, [], [], 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


def chat_model(base: Path, folder: Path) -> Path:
    """A copy of a tiny base model in `folder`, with a chat template."""
    model = folder / base.name
    model.mkdir()
    for file in base.iterdir():
        os.symlink(file, model / file.name)
    config = json.loads((base / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def adapter_copy(case: Path, folder: Path, name: str) -> Path:
    """An adapter of `cases` as directory `name` of a root."""
    return Path(shutil.copytree(case / "adapter", folder / name))


def tensors_body(case: Path) -> bytes:
    """An adapter as the body of /v1/load_lora_adapter_from_tensors."""
    tensors = safetensors.torch.load_file(case / "adapter" / "adapter_model.safetensors")
    config = (case / "adapter" / "adapter_config.json").read_text()
    return safetensors.torch.save(tensors, metadata={"adapter_config": config})


class FakeClient(EngineClient):
    """`fault`: what streams raise after `num_before` deltas. `held` streams wait before their next
    delta. Keeps priorities, and the names of loads, each of which takes `load_delay_s`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.served = AsyncEngine(engine)
        self.state = EngineState.ready
        self.num_restarts = 0
        self.stats = NO_STATS
        self.loop: asyncio.AbstractEventLoop | None = None
        self._open = asyncio.Event()
        self._open.set()
        self.fault: Exception | None = None
        self.num_before = 0
        self.num_open = 0
        self.loads: list[str] = []
        self.priorities: list[int] = []
        self.load_delay_s = 0.0
        self.info = EngineInfo(
            pid=os.getpid(),
            model="tiny",
            max_model_len=engine.model.max_model_len,
            vocab_size=engine.model.spec.vocab_size,
            dtype="float32",
            device="cpu",
            max_adapter_slots=engine.lora_manager.max_loras_per_batch,
            ledger=[LedgerLine("model", 10, "weights", False)],
            kv_bytes=1,
            budget_bytes=2,
            total_bytes=3,
        )
        self.adapters: tuple[AdapterInfo, ...] = ()
        self._update()

    async def stream(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        adapter: str | dict[str, float] | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[TokenDelta, None]:
        packed = msgspec.msgpack.encode((prompt, sampling, adapter, priority))
        ids, fields, choice, order = msgspec.msgpack.decode(packed)
        params = self.engine.sampling_params(**fields)
        self.num_open += 1
        self.priorities.append(order)
        try:
            events = self.served.stream(ids, params, choice, priority=order)
            for index in range(self.num_before if self.fault else 1 << 30):
                await self._open.wait()
                event = await anext(events, None)
                if event is None:
                    return
                self._update()
                yield _delta(index, event)
            assert self.fault is not None
            raise self.fault
        finally:
            await events.aclose()
            self.num_open -= 1

    async def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, replace: bool = False
    ) -> AdapterInfo:
        self.loads.append(name)
        await asyncio.sleep(self.load_delay_s)
        ref = await self.served.load_adapter(name, path, pinned=pinned, replace=replace)
        self._update()
        return self._info(ref)

    async def load_adapter_from_tensors(
        self, name: str, data: bytes, config: dict[str, Any], *, replace: bool = False
    ) -> AdapterInfo:
        try:
            tensors = safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise AdapterError(str(error)) from error
        ref = self.engine.load_adapter_from_tensors(name, tensors, config, replace=replace)
        self._update()
        return self._info(ref)

    async def unload_adapter(self, name: str) -> None:
        await self.served.unload_adapter(name)
        self._update()

    @contextmanager
    def held(self) -> Iterator[None]:
        """For tests on another thread than the server's."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._open.clear)
        yield
        self.loop.call_soon_threadsafe(self._open.set)

    @property
    def idle(self) -> bool:
        """Nothing is left of any request."""
        scheduler = self.engine.scheduler
        free = scheduler.prefix_cache.num_available == scheduler.pages.num_pages
        return free and not self.num_open and not self.engine.has_work

    def _update(self) -> None:
        self.adapters = tuple(self._info(ref) for ref in self.engine.list_adapters())
        self.stats = msgspec.structs.replace(
            NO_STATS, num_running=self.num_open_samples, num_kv_tokens=self.num_kv_tokens
        )

    @property
    def num_open_samples(self) -> int:
        return len(self.engine._samples)

    @property
    def num_kv_tokens(self) -> int:
        return self.engine.kv_pool.num_tokens

    def _info(self, ref: LoRARef) -> AdapterInfo:
        resident = {one.lora_id for one in self.engine.lora_manager.residents}
        ready = ref.lora_id in resident
        return AdapterInfo(ref.name, ref.path, ref.lora_id, ref.pinned, ready, 4, 0)


def _delta(key: int, event: TokenEvent) -> TokenDelta:
    own = event.logprobs
    return TokenDelta(
        key,
        event.index,
        event.token_id,
        event.text,
        event.finish_reason.value if event.finish_reason else None,
        event.error,
        Logprobs(own.logprob, list(own.top)) if own else None,
        [Logprobs(one.logprob, list(one.top)) if one else None for one in event.prompt_logprobs],
    )


@contextmanager
def served(app: ASGIApp, client: FakeClient) -> Iterator[str]:
    """The base URL of a server on a thread of its own, the engine's loop beside it."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_keep_alive=5)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
    started = threading.Event()
    url: list[str] = []

    async def run() -> None:
        client.loop = asyncio.get_running_loop()
        async with client.served:
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            url.append(f"http://127.0.0.1:{port}")
            started.set()
            await task

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield url[0]
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(30)
