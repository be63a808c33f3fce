"""The config tree: every file composes, YAML and dataclasses name the same keys, ranges hold."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.cli.schema import config_keys, register_schema
from engine.config import EngineConfig
from engine.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"
OVERLAYS = "preset"
FILES = sorted(path for path in CONF.glob("*/*.yaml"))
NEEDS_PATH = ("hf", "gguf", "hub", "dummy")


@pytest.fixture(autouse=True)
def composer() -> Iterator[None]:
    register_schema()
    with initialize_config_module("engine.conf", version_base="1.3"):
        yield


def config(*overrides: str) -> EngineConfig:
    """Compose as the command line does and build the dataclasses, which checks the ranges."""
    built = OmegaConf.to_object(compose("config", overrides=list(overrides)))
    assert isinstance(built, EngineConfig)
    return built


def group_values(path: Path) -> Any:
    """What a file says about its own group."""
    values = OmegaConf.to_container(OmegaConf.load(path))
    is_global = path.read_text().startswith("# @package _global_")
    return values[path.parent.name] if is_global else values


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_file_composes(path: Path) -> None:
    needs_path = path.parent.name == "model" and path.stem in NEEDS_PATH
    config(f"{path.parent.name}={path.stem}", *(["model.path=/somewhere"] if needs_path else []))


def test_every_group_is_a_field_and_every_field_a_group() -> None:
    groups = {path.parent.name for path in FILES} - {OVERLAYS}
    plain = {"components", "log_level"}
    assert groups == {field.name for field in fields(EngineConfig)} - plain


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.parent.name != OVERLAYS],
    ids=lambda path: f"{path.parent.name}={path.stem}",
)
def test_a_file_gives_every_field_of_its_dataclass(path: Path) -> None:
    kind = get_type_hints(EngineConfig)[path.parent.name]
    assert list(group_values(path)) == [field.name for field in fields(kind)]


@pytest.mark.parametrize("path", [CONF / "config.yaml", *FILES], ids=lambda path: path.stem)
def test_every_key_is_commented_and_every_file_explained(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and "@package" not in line]
    assert lines[0].startswith("# ")
    keys = {key.rpartition(".")[2] for key in config_keys() if "." in key}
    for line in lines[1:]:
        key = re.match(r" *(\w+):", line)
        if key and key[1] in keys and path.parent.name != OVERLAYS:
            assert "# " in line, line


def test_a_file_without_a_path_asks_for_one() -> None:
    with pytest.raises(ConfigError, match=r"model\.path: got ''"):
        config("model=hf")


def test_defaults_are_the_demo_on_the_cpu() -> None:
    built = config()
    assert built == EngineConfig(lora=built.lora)
    assert built.lora.adapters == {name: f"demo:{name}" for name in ("pirate", "json", "shout")}


def test_mappings_take_new_names_without_a_plus() -> None:
    built = config("lora=default", "lora.adapters.mine=/x", "components.probe._target_=pkg.Probe")
    assert built.lora.adapters == {"mine": "/x"}
    assert built.components == {"probe": {"_target_": "pkg.Probe"}}


def test_presets_overlay_the_groups_and_yield_to_the_command_line() -> None:
    assert config("preset=bf16").model.dtype.value == "bfloat16"
    built = config("preset=small_memory", "lora.max_loras_per_batch=2")
    assert built.lora.max_loras_per_batch == 2
    assert built.memory.max_kv_tokens == 4096


def test_a_plan_is_dry() -> None:
    assert config("command=plan").device.dry
    assert not config().device.dry


@pytest.mark.parametrize(
    "override",
    [
        "model.max_model_len=0",
        "device.index=-1",
        "device.num_threads=0",
        "device.memory_bytes=0",
        "lora.max_loras_per_batch=-1",
        "lora.max_lora_rank=0",
        "lora.pool_rank_rows=1",
        "lora.pinned=[nobody]",
        "memory.fraction=0",
        "memory.fraction=1.5",
        "memory.page_size=0",
        "memory.max_kv_tokens=0",
        "scheduler.max_running_requests=0",
        "scheduler.max_step_tokens=1",
        "scheduler.max_skips=-1",
        "sampling.temperature=-0.5",
        "sampling.temperature=nan",
        "sampling.top_k=-1",
        "sampling.top_p=0",
        "sampling.min_p=2",
        "sampling.max_tokens=0",
        "sampling.repetition_penalty=0",
        "sampling.presence_penalty=3",
        "sampling.min_tokens=99",
        "scheduler.drain_after_s=-1",
        "lora.saved_modules=-1",
        "server.port=65536",
        "server.max_body_bytes=0",
        "server.max_adapter_body_bytes=3000000000",
        "server.max_prompt_tokens=0",
        "server.max_n=129",
        "server.max_requests=0",
        "server.request_timeout_s=0",
        "server.request_timeout_s=nan",
        "server.max_stream_events=0",
        "server.drain_timeout_s=-1",
        "server.max_restarts=-1",
        "server.restart_window_s=0",
        "server.max_adapter_labels=-1",
        "command.batch_sizes=[0]",
        "command.prompt_tokens=0",
        "command.new_tokens=0",
    ],
)
def test_out_of_range(override: str) -> None:
    key, _, given = override.partition("=")
    with pytest.raises((ConfigError, OmegaConfBaseException)) as caught:
        config(override)
    message = str(caught.value)
    assert message.startswith(f"{key}: got ") and "allowed is" in message
    assert given.strip("[]") in message
