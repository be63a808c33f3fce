"""One real server for all tests that may load adapters by name; it ends with the tests."""

import atexit
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from server_support import Server, start_server


@cache
def resolving_server() -> Server:
    """Names of directories in its root are loaded when they are asked for."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="server-"))
    return stack.enter_context(start_server(Path(folder), "lora.resolve=true"))
