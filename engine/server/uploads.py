"""Adapter files that arrive in pieces, in anonymous memory until they are loaded.

Knows nothing of where the pieces come from.
"""

import os
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.errors import AdapterError


class Uploads:
    """Files by the key of their load."""

    def __init__(self) -> None:
        self._files: dict[int, BinaryIO] = {}

    def add(self, key: int, data: bytes) -> None:
        """Append a piece."""
        if key not in self._files:
            self._files[key] = os.fdopen(os.memfd_create("adapter"), "wb", buffering=0)
        self._files[key].write(data)

    def drop(self, key: int) -> None:
        """Forget a file that is not to be loaded, if there is one."""
        file = self._files.pop(key, None)
        if file is not None:
            file.close()

    def take(self, key: int, name: str) -> BinaryIO:
        """A complete file; whoever takes it closes it. Raises AdapterError if there is none."""
        if key not in self._files:
            raise AdapterError(f"adapter {name!r}: no data came for it; send a safetensors file")
        return self._files.pop(key)


def read_tensors(file: BinaryIO, name: str) -> dict[str, torch.Tensor]:
    """All tensors of a file of `Uploads`, whose memory they share. Raises AdapterError."""
    try:
        return load_file(f"/proc/self/fd/{file.fileno()}")
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        raise AdapterError(
            f"adapter {name!r}: the data is no safetensors file ({error})"
        ) from error
