"""The engine's loop: one step after the other, and between two of them what others hand over.

Knows nothing of who hands over and who listens. `run` takes one thread, which is the only one that
touches the engine; the rest may be called from any.
"""

import queue
from collections.abc import Callable

from loguru import logger

from engine.serving.engine import Engine
from engine.serving.output import TokenEvent

Task = Callable[[], object]


class EngineLoop:
    """Each turn runs all tasks that have arrived, then a step, then `on_turn` with its events."""

    def __init__(self, on_turn: Callable[[list[TokenEvent]], object]) -> None:
        self._on_turn = on_turn
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def hand_over(self, task: Task) -> None:
        """Run `task`, which must not raise, before the next step."""
        self._tasks.put(task)

    def stop(self) -> None:
        """End `run` after what was handed over before."""
        self._tasks.put(None)

    def run(self, engine: Engine) -> None:
        """Take turns until `stop`, waiting for tasks while there is nothing to compute."""
        while self._run_tasks(block=not engine.has_work):
            self._on_turn(_step(engine))

    def _run_tasks(self, *, block: bool) -> bool:
        """Run what has arrived, or wait for it; False to stop."""
        while True:
            try:
                task = self._tasks.get(block=block)
            except queue.Empty:
                return True
            if task is None:
                return False
            task()
            block = False


def _step(engine: Engine) -> list[TokenEvent]:
    """One step; a fault of the engine itself ends all requests with an error, not the loop."""
    try:
        return engine.step()
    except Exception as error:
        logger.exception("the engine's step failed")
        return engine.fail_all(str(error))
