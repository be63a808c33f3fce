"""What all routes share: the engine's client, the configuration, and the state of this server."""

from dataclasses import dataclass

from engine.config import ServerConfig
from engine.server.client import EngineClient
from engine.server.front import FrontEnd
from engine.server.limits import Admission, Watchdog
from engine.server.names import Names
from engine.server.observer import Observer


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """One server."""

    client: EngineClient
    cfg: ServerConfig
    front: FrontEnd
    observer: Observer
    names: Names
    admission: Admission
    watchdog: Watchdog

    @classmethod
    def of(
        cls, client: EngineClient, cfg: ServerConfig, front: FrontEnd, observer: Observer
    ) -> "Service":
        return cls(
            client,
            cfg,
            front,
            observer,
            Names(client, front),
            Admission(cfg.max_requests),
            Watchdog(client),
        )
