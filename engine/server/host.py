"""Commands of the front end, applied to the engine between its steps, and the report of each turn.

Adapter files are read and grammars compiled on threads, other requests go on meanwhile. Knows
nothing of sockets and processes.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from loguru import logger

from engine.errors import EngineError
from engine.lora.manager import ReadAdapter
from engine.lora.ref import FROM_TENSORS
from engine.runtime.sampler import TokenLogprobs
from engine.runtime.sampling_params import SamplingParams
from engine.server.messages import (
    Abort,
    AdapterData,
    AdapterInfo,
    AnyCommand,
    EngineStats,
    LoadAdapter,
    LoadAdapterTensors,
    Logprobs,
    Reply,
    Shutdown,
    StepReport,
    Submit,
    TokenDelta,
    UnloadAdapter,
)
from engine.server.snapshot import adapter_infos, engine_stats
from engine.server.uploads import Uploads, read_tensors
from engine.serving.engine import Engine
from engine.serving.loop import EngineLoop
from engine.serving.output import TokenEvent

# While steps go on, counts are reported no more often.
STATS_INTERVAL_S = 0.05


@dataclass(slots=True)
class _Open:
    """A submitted request: how many samples have not ended, and the engine's id, once it has
    one.
    """

    key: int
    num_left: int
    request_id: int | None = None


class EngineHost:
    """Runs an engine for one front end."""

    def __init__(self, send: Callable[[StepReport], object]) -> None:
        self._send = send
        self._loop = EngineLoop(self._report)
        self._engine: Engine
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._adapters = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._uploads = Uploads()
        self._by_key: dict[int, _Open] = {}
        self._by_request: dict[int, _Open] = {}
        self._replies: list[Reply] = []
        self._told: tuple[list[AdapterInfo], EngineStats] | None = None
        self._told_at = 0.0

    def run(self, engine: Engine) -> None:
        """Serve until `stop` or a Shutdown."""
        self._engine = engine
        self._loop.run(engine)
        for pool in (self._grammars, self._adapters):
            pool.shutdown(wait=False, cancel_futures=True)

    def take(self, command: AnyCommand) -> None:
        """Apply a command as soon as may be; from any thread."""
        if isinstance(command, Shutdown):
            self.stop()
        else:
            self._loop.hand_over(lambda: self._attempt(command.key, lambda: self._apply(command)))

    def stop(self) -> None:
        """End `run` after the current step; from any thread."""
        self._loop.stop()

    # ------------------------------------------------------------------ commands

    def _apply(self, command: AnyCommand) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command)
            case AdapterData():
                self._uploads.add(command.target, command.data)
            case LoadAdapter() | LoadAdapterTensors():
                self._load(command)
            case UnloadAdapter():
                self._engine.unload_adapter(command.name)
                self._replies.append(Reply(command.key))

    def _submit(self, command: Submit) -> None:
        params = self._engine.sampling_params(**command.sampling)
        own = self._by_key[command.key] = _Open(command.key, params.n)
        structure = params.structure
        if structure is None:
            self._add(command, params, own)
            return

        def compile_then_add() -> None:
            self._engine.grammars.matcher(*structure)
            self._hand_over(command.key, lambda: self._add(command, params, own))

        self._work(self._grammars, command.key, compile_then_add)

    def _add(self, command: Submit, params: SamplingParams, own: _Open) -> None:
        """Queue a request, unless it was given up meanwhile."""
        if own.key in self._by_key:
            own.request_id = self._engine.add_request(
                command.prompt, params, command.adapter, priority=command.priority
            )
            self._by_request[own.request_id] = own

    def _abort(self, command: Abort) -> None:
        self._uploads.drop(command.target)
        own = self._by_key.pop(command.target, None)
        if own is not None and own.request_id is not None:
            del self._by_request[own.request_id]
            self._engine.abort(own.request_id)

    def _load(self, command: LoadAdapter | LoadAdapterTensors) -> None:
        """Read an adapter on a thread, load it between two steps."""
        read = self._reader(command)

        def read_then_load() -> None:
            found = read()
            self._hand_over(command.key, lambda: self._register(command, found))

        self._work(self._adapters, command.key, read_then_load)

    def _reader(self, command: LoadAdapter | LoadAdapterTensors) -> Callable[[], ReadAdapter]:
        engine, name = self._engine, command.name
        if isinstance(command, LoadAdapter):
            path = command.path
            return lambda: engine.read_adapter(name, path)
        file, config = self._uploads.take(command.key, name), command.config

        def read() -> ReadAdapter:
            with file:
                return engine.read_adapter_from_tensors(name, read_tensors(file, name), config)

        return read

    def _register(self, command: LoadAdapter | LoadAdapterTensors, read: ReadAdapter) -> None:
        path, pinned = FROM_TENSORS, False
        if isinstance(command, LoadAdapter):
            path, pinned = command.path, command.pinned
        ref = self._engine.load_adapter(
            command.name, path, pinned=pinned, replace=command.replace, read=read
        )
        infos = adapter_infos(self._engine)
        (info,) = (info for info in infos if info.lora_id == ref.lora_id)
        self._replies.append(Reply(command.key, adapter=info))

    # ------------------------------------------------------------------ threads and refusals

    def _hand_over(self, key: int, task: Callable[[], object]) -> None:
        self._loop.hand_over(lambda: self._attempt(key, task))

    def _work(self, pool: ThreadPoolExecutor, key: int, work: Callable[[], object]) -> None:
        """Run `work` on a thread; what it raises is told from the loop."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                refused = error
                self._loop.hand_over(lambda: self._refuse(key, refused))

        pool.submit(guarded)

    def _attempt(self, key: int, task: Callable[[], object]) -> None:
        try:
            task()
        except Exception as error:
            self._refuse(key, error)

    def _refuse(self, key: int, error: Exception) -> None:
        """Tell why a command failed. Nothing is left of it."""
        self._by_key.pop(key, None)
        if not isinstance(error, EngineError):
            logger.opt(exception=error).error("a command of the front end failed")
        self._replies.append(Reply(key, type(error).__name__, str(error) or repr(error)))

    # ------------------------------------------------------------------ reports

    def _report(self, events: list[TokenEvent]) -> None:
        """Send what this turn has brought, if it did."""
        deltas = [delta for event in events if (delta := self._delta(event)) is not None]
        replies, self._replies = self._replies, []
        adapters, stats = self._changes(now=bool(replies))
        if deltas or replies or adapters is not None or stats is not None:
            self._send(StepReport(replies, deltas, adapters, stats))

    def _delta(self, event: TokenEvent) -> TokenDelta | None:
        own = self._by_request.get(event.request_id)
        if own is None:
            return None
        if event.finish_reason is not None:
            own.num_left -= 1
            if not own.num_left:
                del self._by_request[event.request_id], self._by_key[own.key]
        return TokenDelta(
            own.key,
            event.index,
            event.token_id,
            event.text,
            None if event.finish_reason is None else event.finish_reason.value,
            event.error,
            _logprobs(event.logprobs),
            [_logprobs(entry) for entry in event.prompt_logprobs],
        )

    def _changes(self, *, now: bool) -> tuple[list[AdapterInfo] | None, EngineStats | None]:
        """Adapters and counts where they differ from those told last, if it is time to."""
        engine, time_s = self._engine, time.monotonic()
        if engine.has_work and not now and time_s - self._told_at < STATS_INTERVAL_S:
            return None, None
        self._told_at = time_s
        before, self._told = self._told, (adapter_infos(engine), engine_stats(engine))
        adapters, stats = self._told
        if before is None:
            return adapters, stats
        return (
            adapters if adapters != before[0] else None,
            stats if stats != before[1] else None,
        )


def _logprobs(entry: TokenLogprobs | None) -> Logprobs | None:
    return None if entry is None else Logprobs(entry.logprob, list(entry.top))
