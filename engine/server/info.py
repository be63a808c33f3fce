"""Routes that tell of the server: models, health, readiness, metrics, memory, version."""

import time

from engine import __version__
from engine.server.answers import MemoryAnswer, ModelCard, ModelList
from engine.server.client import EngineState
from engine.server.errors import unavailable
from engine.server.exchange import Exchange
from engine.server.limits import WHY_NOT
from engine.server.messages import AdapterInfo
from engine.server.service import Service
from engine.server.sse import encode

OWNER = "lora-engine"
STUCK_AFTER_S = 60.0
NO_STORE = ((b"cache-control", b"no-store"),)
STARTED = int(time.time())


async def models(service: Service, exchange: Exchange) -> None:
    cards = [_base_card(service), *(_card(service, info) for info in service.client.adapters)]
    await exchange.answer(encode(ModelList(cards)))


async def model(service: Service, exchange: Exchange) -> None:
    asked = str(exchange.scope["path_params"]["model"])
    name = service.names.plain(asked)
    if name is None:
        await exchange.answer(encode(_base_card(service)))
        return
    info = service.names.loaded(name)
    if info is None:
        raise service.names.unknown(asked)
    await exchange.answer(encode(_card(service, info)))


async def health(service: Service, exchange: Exchange) -> None:
    """Whether the engine lives and gets on; one that shuts down in good order does."""
    state = service.client.state
    if state in (EngineState.dead, EngineState.starting):
        raise unavailable(WHY_NOT[state])
    stuck_for_s = service.watchdog.stuck_for_s()
    if stuck_for_s > STUCK_AFTER_S:
        raise unavailable(f"the engine has work and made no progress for {stuck_for_s:.0f} s")
    await exchange.answer(b'{"status":"ok"}', headers=NO_STORE)


async def ready(service: Service, exchange: Exchange) -> None:
    """Whether requests should be sent here."""
    if service.client.state is not EngineState.ready:
        raise unavailable(WHY_NOT[service.client.state])
    await exchange.answer(b'{"status":"ready"}', headers=NO_STORE)


async def metrics(service: Service, exchange: Exchange) -> None:
    observer = service.observer
    await exchange.answer(observer.render(), media_type=observer.content_type.encode())


async def memory(service: Service, exchange: Exchange) -> None:
    info, stats = service.client.info, service.client.stats
    answer = MemoryAnswer(
        info.device,
        info.dtype,
        info.ledger,
        info.kv_bytes,
        info.budget_bytes,
        info.total_bytes,
        stats.num_kv_tokens,
        stats.num_kv_tokens_used,
    )
    await exchange.answer(encode(answer), headers=NO_STORE)


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.answer(encode({"version": __version__}))


def _base_card(service: Service) -> ModelCard:
    info = service.client.info
    return ModelCard(
        id=service.front.model_name,
        created=STARTED,
        owned_by=OWNER,
        root=info.model,
        parent=None,
        max_model_len=info.max_model_len,
        ready=service.client.state is EngineState.ready,
        pinned=True,
    )


def _card(service: Service, adapter: AdapterInfo) -> ModelCard:
    return ModelCard(
        id=adapter.name,
        created=STARTED,
        owned_by=OWNER,
        root=adapter.path,
        parent=service.front.model_name,
        max_model_len=service.client.info.max_model_len,
        ready=adapter.ready,
        pinned=adapter.pinned,
    )
