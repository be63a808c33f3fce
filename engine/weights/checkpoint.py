"""Where a model's files are and how their tensors are read, one by one, under Hugging Face names.

A checkpoint knows its spec and its tokenizer's data; it does not know the layers that it fills.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.config import LoadFormat, ModelConfig
from engine.errors import ModelError
from engine.models.spec import ModelSpec
from engine.text.tokenizer import TokenizerData
from engine.weights.default_model import default_model_directory
from engine.weights.gguf_file import GGUFFile
from engine.weights.gguf_tokenizer import tokenizer_data

DEFAULT = "default"
HUB_PREFIX = "hub:"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint(ABC):
    """`spec`, a short `name` for logs; a dummy has no tensors, its model is filled randomly."""

    spec: ModelSpec
    name: str
    is_dummy: bool = False

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the file's dtype, each read when it is asked for. Raises ModelError."""

    @abstractmethod
    def tokenizer_data(self) -> TokenizerData:
        """What the tokenizer is made of; empty if the checkpoint has none."""


class DirectoryCheckpoint(Checkpoint):
    """A Hugging Face directory: config.json and safetensors, one file or indexed shards."""

    def __init__(self, directory: Path, *, dummy: bool = False) -> None:
        self.directory = directory
        self.name = directory.name or str(directory)
        self.is_dummy = dummy
        self.spec = ModelSpec.from_config(
            read_json(directory / "config.json"),
            read_json(directory / "generation_config.json", optional=True),
        )

    def tokenizer_data(self) -> TokenizerData:
        return _directory_tokenizer(self.directory)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self._files():
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 (no iteration over the file itself)
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path}: cannot be read ({error}); fetch the file again"
                ) from error

    def _files(self) -> list[Path]:
        index = self.directory / INDEX
        if index.is_file():
            shards = sorted(set(read_json(index).get("weight_map", {}).values()))
            paths = [self.directory / shard for shard in shards]
        else:
            paths = [self.directory / SINGLE]
        missing = [path.name for path in paths if not path.is_file()]
        if missing or not paths:
            raise ModelError(
                f"{self.directory}: {', '.join(missing) or INDEX + ' names no file and it'} is "
                "missing; "
                f"expected {SINGLE}, or {INDEX} with its shards (load_format=dummy needs none)"
            )
        return paths


class GGUFCheckpoint(Checkpoint):
    """One .gguf file, dequantized by tensor; a tokenizer.json beside it wins over its own."""

    def __init__(self, path: Path) -> None:
        self.gguf = GGUFFile(path)
        self.name = path.name
        self.spec = ModelSpec.from_config(self.gguf.config())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.gguf.tensors()

    def tokenizer_data(self) -> TokenizerData:
        beside = _directory_tokenizer(self.gguf.path.parent)
        return beside if beside.tokenizer_json else tokenizer_data(self.gguf)


def open_checkpoint(cfg: ModelConfig) -> Checkpoint:
    """The checkpoint that `model.path` names. Raises ModelError; only "hub:" uses the Hub."""
    path = _local_path(cfg)
    if cfg.load_format is LoadFormat.gguf or (
        cfg.load_format is LoadFormat.auto and path.suffix == ".gguf"
    ):
        return GGUFCheckpoint(path)
    if path.is_file() and path.name == "config.json":
        path = path.parent
    if not path.is_dir():
        raise ModelError(
            f"model.path: {cfg.path!r} is no directory and no .gguf file; give a Hugging Face "
            f"directory, a .gguf file, {HUB_PREFIX}owner/name, or {DEFAULT}"
        )
    return DirectoryCheckpoint(path, dummy=cfg.load_format is LoadFormat.dummy)


def _directory_tokenizer(directory: Path) -> TokenizerData:
    """What there is of tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer = directory / "tokenizer.json"
    config = read_json(directory / "tokenizer_config.json", optional=True)
    template = directory / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text()
    return TokenizerData(tokenizer.read_text() if tokenizer.is_file() else "", config)


def _local_path(cfg: ModelConfig) -> Path:
    cache = Path(cfg.cache_dir).expanduser() if cfg.cache_dir else None
    if cfg.path == DEFAULT:
        return default_model_directory(cache)
    if cfg.path.startswith(HUB_PREFIX):
        return _from_hub(cfg.path.removeprefix(HUB_PREFIX), cfg.revision, cache)
    return Path(cfg.path).expanduser()


def _from_hub(repository: str, revision: str | None, cache: Path | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            "model.path: the Hub needs huggingface_hub; pip install 'lora-engine[hub]'"
        ) from error
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            )
        )
    except Exception as error:  # the library raises many kinds, network ones among them
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"model.path: {repository!r} cannot be had from the Hub: {reason}"
        ) from error


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a file; {} if it is optional and absent. Raises ModelError."""
    if not path.is_file():
        if optional:
            return {}
        raise ModelError(f"{path}: missing; model.path must be a Hugging Face model directory")
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds a {type(found).__name__}, expected a JSON object")
    return found
