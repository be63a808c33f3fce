"""What `python -m engine` can do: one module per command, each takes the built container.

Modules are imported when their command runs, so that asking for help imports none of them.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from engine.commands.result import JobResult
from engine.config import CommandName

if TYPE_CHECKING:
    from engine.containers import EngineContainer

Command = Callable[["EngineContainer"], JobResult]


def find_command(name: CommandName) -> Command:
    """The `run` function of `engine.commands.<name>`."""
    command: Command = import_module(f"engine.commands.{name.value}").run
    return command
