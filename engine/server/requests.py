"""What handlers read of a request before they know its shape."""

from engine.server.errors import bad_request
from engine.server.exchange import Exchange
from engine.server.protocol import GenerationBody
from engine.server.service import Service


async def read_body(service: Service, exchange: Exchange) -> bytes:
    """A JSON body within its limit. Raises ApiError, ClientGone."""
    cfg = service.cfg
    return await exchange.body(cfg.max_body_bytes, "server.max_body_bytes", cfg.request_timeout_s)


def wants_usage(body: GenerationBody) -> bool:
    """Whether a stream ends with its usage. Raises ApiError if it is asked for without one."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise bad_request(
            "stream_options: are for streams; set stream to true, or leave them out",
            param="stream_options",
        )
    return options is not None and bool(options.include_usage)
