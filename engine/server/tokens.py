"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio

from engine.server.answers import DetokenizeAnswer, TokenizeAnswer
from engine.server.errors import bad_request
from engine.server.exchange import Exchange
from engine.server.prompts import chat_ids, check_token_ids, text_ids
from engine.server.protocol import DetokenizeBody, TokenizeBody, decode
from engine.server.requests import read_body
from engine.server.service import Service
from engine.server.sse import encode


async def tokenize(service: Service, exchange: Exchange) -> None:
    body = decode(await read_body(service, exchange), TokenizeBody)
    await _check_model(service, body.model)
    tokenizer = service.front.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        [ids] = await text_ids(tokenizer, [body.prompt], special=special)
    else:
        ids = await chat_ids(tokenizer, body)
    texts = [service.front.token_text(token_id) for token_id in ids]
    answer = TokenizeAnswer(
        len(ids),
        service.client.info.max_model_len,
        ids,
        texts if body.return_token_strs else None,
    )
    await exchange.answer(encode(answer))


async def detokenize(service: Service, exchange: Exchange) -> None:
    body = decode(await read_body(service, exchange), DetokenizeBody)
    await _check_model(service, body.model)
    check_token_ids("tokens", body.tokens, service.client.info.vocab_size)
    tokenizer = service.front.tokenizer
    text = await asyncio.to_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    await exchange.answer(encode(DetokenizeAnswer(text)))


async def _check_model(service: Service, model: str | None) -> None:
    """All adapters share the base's tokenizer; but a name must be somebody's."""
    if model is not None:
        await service.names.target(model, None)
