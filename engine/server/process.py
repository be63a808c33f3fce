"""The engine process: builds the container, then takes commands between steps and sends a report of
each turn.

Ends with the front end, or when told to. Knows nothing of HTTP; nothing on the wire is a pickle.
"""

import os
import signal
import socket
import threading
import time

from loguru import logger

from engine import wiring
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.server.host import EngineHost
from engine.server.logs import log_to_stderr
from engine.server.messages import AnyCommand, AnyReport, Failed, Ready
from engine.server.snapshot import adapter_infos, engine_info, engine_stats
from engine.server.wire import FrameReader, frame

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
CHUNK_BYTES = 1 << 18
# From the end of the front end: what a step, or a start, that goes on may still take.
EXIT_GRACE_S = 10.0


def run_engine(config: EngineConfig, connection: socket.socket) -> None:
    """The main of the spawned process; signals to stop are the front end's business."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    log_to_stderr(config.log_level, json=config.server.json_log)
    host = EngineHost(lambda report: _send(connection, report))
    threading.Thread(target=_receive, args=(connection, host), daemon=True).start()
    try:
        container = wiring.build(config)
        engine = container.engine()
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("the engine cannot be built")
        _send(connection, Failed(str(error) or type(error).__name__))
        return
    info = engine_info(engine, container.checkpoint().name, container.device())
    if _send(connection, Ready(info, adapter_infos(engine), engine_stats(engine))):
        host.run(engine)


def _send(connection: socket.socket, report: AnyReport) -> bool:
    """False if nobody is there any more."""
    try:
        connection.sendall(frame(report))
    except OSError:
        return False
    return True


def _receive(connection: socket.socket, host: EngineHost) -> None:
    frames: FrameReader[AnyCommand] = FrameReader(AnyCommand)
    try:
        while data := connection.recv(CHUNK_BYTES):
            for command in frames.feed(data):
                host.take(command)
    except OSError as error:
        logger.error("the front end cannot be heard any more: {}", error)
    host.stop()
    time.sleep(EXIT_GRACE_S)
    os._exit(1)
