"""What `python -m engine` can do: one module per command, each takes the built container; those of
ON_CONFIG take the config and see to the container themselves.

Modules are imported when their command runs, so that asking for help imports none of them.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from engine.commands.result import JobResult
from engine.config import CommandName

Command = Callable[[Any], JobResult]

ON_CONFIG = frozenset({CommandName.serve})


def find_command(name: CommandName) -> Command:
    """The `run` function of `engine.commands.<name>`."""
    command: Command = import_module(f"engine.commands.{name.value}").run
    return command
