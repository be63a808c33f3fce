"""Admin routes: load an adapter from a directory or from tensors, unload one; vLLM's bodies and
answers.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from engine.errors import AdapterError, CapacityError
from engine.server.errors import ApiError, bad_request
from engine.server.exchange import TEXT, Exchange
from engine.server.limits import check_serving
from engine.server.paths import NOT_FOUND, USER_ERROR, name_fault
from engine.server.protocol import LoadAdapterBody, UnloadAdapterBody, decode
from engine.server.requests import read_body
from engine.server.service import Service

CONFIG_KEY = "adapter_config"
SIZE_BYTES = 8  # a safetensors file begins with the size of its header
MAX_HEADER_BYTES = 100_000_000
FLAGS = {"true": True, "1": True, "false": False, "0": False}


class _Header(msgspec.Struct):
    """What of a safetensors header is read here."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


async def load_adapter(service: Service, exchange: Exchange) -> None:
    check_serving(service.client)
    body = decode(await read_body(service, exchange), LoadAdapterBody)
    replace = bool(body.replace or body.load_inplace)
    pinned = bool(body.pinned)
    _check_name(service, body.lora_name)
    directory = await asyncio.to_thread(service.front.roots.directory, body.lora_path)

    async def load() -> object:
        _check_free(service, body.lora_name, replace=replace)
        return await service.client.load_adapter(
            body.lora_name, str(directory), pinned=pinned, replace=replace
        )

    await _change(service, exchange, body.lora_name, load, "added")


async def load_adapter_from_tensors(service: Service, exchange: Exchange) -> None:
    """The body is a safetensors file whose metadata has the adapter_config.json under
    CONFIG_KEY; `lora_name` and `replace` are in the query.
    """
    check_serving(service.client)
    name, replace = _query(exchange)
    _check_name(service, name)
    cfg = service.cfg
    data = await exchange.body(
        cfg.max_adapter_body_bytes, "server.max_adapter_body_bytes", cfg.request_timeout_s
    )
    config = _config(data)

    async def load() -> object:
        _check_free(service, name, replace=replace)
        return await service.client.load_adapter_from_tensors(name, data, config, replace=replace)

    await _change(service, exchange, name, load, "added")


async def unload_adapter(service: Service, exchange: Exchange) -> None:
    check_serving(service.client)
    name = decode(await read_body(service, exchange), UnloadAdapterBody).lora_name

    async def unload() -> None:
        if service.names.loaded(name) is None:
            raise ApiError(404, f"The lora adapter {name[:256]!r} cannot be found.", kind=NOT_FOUND)
        await service.client.unload_adapter(name)

    await _change(service, exchange, name, unload, "removed")


async def _change(
    service: Service,
    exchange: Exchange,
    name: str,
    change: Callable[[], Awaitable[object]],
    done: str,
) -> None:
    """Make a change under the lock of its name, and tell in vLLM's words."""
    try:
        await service.names.alone(name, change)
    except (AdapterError, CapacityError) as error:
        raise ApiError(400, str(error), kind="BadRequestError", param="lora_name") from error
    text = f"Success: LoRA adapter '{name}' {done} successfully."
    await exchange.answer(text.encode(), media_type=TEXT)


def _check_name(service: Service, name: str) -> None:
    """Raise ApiError unless an adapter may be called so."""
    base = service.front.model_name
    fault = name_fault(name)
    if not fault and (name == base or name.startswith(f"{base}:")):
        fault = f"is the base model's, or begins with it and a colon ({base!r})"
    if fault:
        raise ApiError(400, f"lora_name: {fault}", kind=USER_ERROR, param="lora_name")


def _check_free(service: Service, name: str, *, replace: bool) -> None:
    if not replace and service.names.loaded(name) is not None:
        raise ApiError(
            400,
            f"The lora adapter '{name}' has already been loaded. To load it again give replace "
            "(or load_inplace) true.",
            kind=USER_ERROR,
            param="lora_name",
        )


def _query(exchange: Exchange) -> tuple[str, bool]:
    """The name, and whether to replace."""
    query = QueryParams(exchange.scope["query_string"])
    surplus = [key for key in query if key not in ("lora_name", "replace")]
    flag = query.get("replace", "false").lower()
    if surplus or "lora_name" not in query or flag not in FLAGS:
        raise bad_request(
            "the query needs lora_name=NAME and may have replace=true or false; nothing else"
        )
    return query["lora_name"], FLAGS[flag]


def _config(data: bytes) -> dict[str, Any]:
    """The adapter_config.json in a safetensors file's metadata. Raises ApiError."""
    size = int.from_bytes(data[:SIZE_BYTES], "little")
    try:
        if len(data) < SIZE_BYTES or not 0 < size <= min(MAX_HEADER_BYTES, len(data) - SIZE_BYTES):
            raise ValueError("its header does not fit into it")
        header = msgspec.json.decode(data[SIZE_BYTES : SIZE_BYTES + size], type=_Header)
        text = header.metadata.get(CONFIG_KEY, "")
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ApiError(
            400,
            f"the body is no safetensors file with an adapter's config as JSON text in its "
            f"metadata under {CONFIG_KEY!r}: {error}",
            kind=USER_ERROR,
        ) from error
