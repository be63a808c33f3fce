"""Where adapters may be loaded from: directories under `server.adapter_roots`, symlinks resolved.

Refusals say the same of everything outside, whether it exists or not.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ConfigError
from engine.server.errors import ApiError

MAX_PATH_CHARS = 4096
MAX_NAME_CHARS = 256
USER_ERROR, NOT_FOUND = "InvalidUserInput", "NotFoundError"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class AdapterRoots:
    """The allowed directories."""

    def __init__(self, roots: Iterable[str]) -> None:
        """Raises ConfigError if one is no directory."""
        self._roots = [_root(text) for text in roots]

    def directory(self, text: str) -> Path:
        """The directory that a path names, absolute or relative to one of the roots. Raises
        ApiError.
        """
        if not self._roots:
            raise ApiError(
                403,
                "loading by path is off: server.adapter_roots is empty; list the directories there "
                "that adapters may come from",
                kind="permission_error",
                param="lora_path",
                code="forbidden",
            )
        path = _checked(text)
        inside = [found for root in self._roots if (found := self._inside(root / path)) is not None]
        for found in inside:
            if os.path.isdir(found):  # False, too, for names that no system takes
                self._check_files(found)
                return found
        if inside:
            raise ApiError(
                404,
                f"lora_path: no adapter directory {text!r} under server.adapter_roots",
                kind=NOT_FOUND,
                param="lora_path",
            )
        raise _outside()

    def find(self, name: str) -> Path | None:
        """The directory of that name in one of the roots, if there is one."""
        if not self._roots or name_fault(name):
            return None
        try:
            return self.directory(f"./{name}")
        except ApiError:
            return None

    def _inside(self, path: Path) -> Path | None:
        try:
            found = path.resolve()
        except (OSError, RuntimeError):  # a loop of symlinks, a name that no system takes
            return None
        inside = any(found.is_relative_to(root) and found != root for root in self._roots)
        return found if inside else None

    def _check_files(self, directory: Path) -> None:
        """No file of the adapter may be a link that leads out."""
        try:
            links = [entry for entry in directory.iterdir() if entry.is_symlink()]
        except OSError as error:
            raise ApiError(
                400, "lora_path: the directory cannot be read", kind=USER_ERROR, param="lora_path"
            ) from error
        if any(self._inside(link) is None for link in links):
            raise _outside()


def name_fault(name: str) -> str:
    """Why `name` cannot be an adapter's; empty if it can."""
    parts = name.split("/")
    if not 0 < len(name) <= MAX_NAME_CHARS:
        return f"has {len(name)} characters, allowed are 1 to {MAX_NAME_CHARS}"
    if not name.isprintable() or name != name.strip() or "\\" in name:
        return "has blanks at an end, a backslash, or characters that cannot be printed"
    if any(part in ("", ".", "..") for part in parts):
        return "has empty parts, '.' or '..' between its slashes"
    return ""


def _checked(text: str) -> Path:
    fault = ""
    if not 0 < len(text) <= MAX_PATH_CHARS:
        fault = f"has {len(text)} characters, allowed are 1 to {MAX_PATH_CHARS}"
    elif not text.isprintable():
        fault = "has characters that cannot be printed"
    elif _SCHEME.match(text):
        fault = "names a scheme; adapters are loaded from directories only"
    elif ".." in Path(text).parts or text.startswith("~"):
        fault = "has '..' or begins with '~'; write the directory's own path"
    if fault:
        raise ApiError(400, f"lora_path: {fault}", kind=USER_ERROR, param="lora_path")
    return Path(text)


def _outside() -> ApiError:
    return ApiError(
        403,
        "lora_path: leads out of server.adapter_roots; adapters are loaded from directories under "
        "them only",
        kind="permission_error",
        param="lora_path",
        code="forbidden",
    )


def _root(text: str) -> Path:
    root = Path(text).expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(f"server.adapter_roots: {text!r} is no directory")
    return root
