"""adapter_model.bin: a state dict as torch.save writes it, read by torch's restricted unpickler.

torch takes a storage's size from the pickle and not from the archive: where a record is shorter, it
hands out whatever lies behind it in memory. So the archive is read here first, every record's
length and checksum are checked against what the pickle says of it, and torch gets a fresh archive
of just these records. Nothing of the pickle is executed.
"""

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.errors import AdapterError

# Bytes of one number by the name of its storage class in torch.
ITEM_BYTES = {
    "DoubleStorage": 8, "LongStorage": 8, "FloatStorage": 4, "IntStorage": 4, "HalfStorage": 2,
    "BFloat16Storage": 2, "ShortStorage": 2, "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1,
    "UntypedStorage": 1, "Float8_e4m3fnStorage": 1, "Float8_e5m2Storage": 1,
    "Float8_e4m3fnuzStorage": 1, "Float8_e5m2fnuzStorage": 1,
}  # fmt: skip


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a state dict. Raises AdapterError on anything else, OSError."""
    try:
        archive = _checked_copy(path)
        found = torch.load(archive, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # zipfile, pickle and torch raise anything on broken input
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise _refusal(path, reason) from error
    if not isinstance(found, dict) or not all(
        isinstance(key, str) and isinstance(t, torch.Tensor) for key, t in found.items()
    ):
        raise _refusal(path, f"it holds a {type(found).__name__}, expected names with tensors")
    return found


def _refusal(path: Path, reason: str) -> AdapterError:
    return AdapterError(
        f"{path.name}: is no plain state dict ({reason}); save the adapter as "
        "adapter_model.safetensors"
    )


def _checked_copy(path: Path) -> io.BytesIO:
    """An archive in memory with the records of the one at `path`, all of the sizes that the pickle
    gives. Raises ValueError and what zipfile and pickle raise.
    """
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        if len(set(names)) < len(names):
            raise ValueError("a record is there twice")
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise ValueError("records are compressed")
        if sum(info.file_size for info in infos) > path.stat().st_size:
            raise ValueError("records overlap")
        records = {info.filename: archive.read(info) for info in infos}  # checks checksums
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("there is no data.pkl, or more than one")
    folder = pickles[0].removesuffix("data.pkl")
    for key, num_bytes in _storages(records[pickles[0]]):
        record = records.get(f"{folder}data/{key}")
        if record is None or len(record) != num_bytes:
            size = "is missing" if record is None else f"has {len(record)} bytes"
            raise ValueError(f"record {key} {size}, {num_bytes} are expected")
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    copy.seek(0)
    return copy


def _storages(pickled: bytes) -> Iterator[tuple[str, int]]:
    """Key and bytes of each storage that a pickle refers to."""
    reader = _StorageReader(io.BytesIO(pickled))
    reader.load()
    for pid in reader.found:
        if not isinstance(pid, tuple) or len(pid) != 5:
            raise ValueError("a storage is referred to in an unknown way")
        _, kind, key, _, count = pid
        item_bytes = ITEM_BYTES.get(getattr(kind, "__name__", ""))
        if item_bytes is None or not isinstance(key, str) or not isinstance(count, int):
            raise ValueError("a storage is referred to in an unknown way")
        yield key, item_bytes * count


class _Inert:
    """Stands for every class and function that a pickle names, and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "_Inert":
        return self

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass


class _StorageReader(pickle.Unpickler):
    """Walks through a pickle and notes its persistent ids; nothing that it names is looked up."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        self.found.append(pid)
        return _Inert()
