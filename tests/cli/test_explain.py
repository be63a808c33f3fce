"""A mistake on the command line is one line: the key, what was given, what is allowed."""

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf

from engine.cli.explain import explain, unknown_key
from engine.cli.schema import register_schema, surplus_keys
from engine.errors import ConfigError


@pytest.fixture(autouse=True)
def composer() -> Iterator[None]:
    register_schema()
    with initialize_config_module("engine.conf", version_base="1.3"):
        yield


def line_for(*overrides: str) -> str:
    with pytest.raises((HydraException, ConfigError)) as caught:
        OmegaConf.to_object(compose("config", overrides=list(overrides)))
    line = explain(caught.value)
    assert line is not None and "\n" not in line
    return line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "lora.max_loras_per_batch=eight",
            "lora.max_loras_per_batch: got 'eight', allowed is a whole number",
        ),
        (
            "lora.max_loras_per_batch=-1",
            "lora.max_loras_per_batch: got -1, allowed is a number from 0 to 4096",
        ),
        (
            "model.max_model_len=x",
            "model.max_model_len: got 'x', allowed is a whole number or null",
        ),
        ("memory.fraction=half", "memory.fraction: got 'half', allowed is a number"),
        ("command.chat=maybe", "command.chat: got 'maybe', allowed is true or false"),
        ("lora.eviction=lfu", "lora.eviction: got 'lfu', allowed is lru | fifo"),
        (
            "command.batch_sizes=3",
            "command.batch_sizes: got 3, allowed is a list of whole numbers, as [A, B]",
        ),
        ("command.batch_sizes=[a]", "command.batch_sizes[0]: got 'a', allowed is a whole number"),
        ("lora.adapters=x", "lora.adapters: got 'x', allowed is a mapping, as {NAME: VALUE}"),
        ("model=gpt", "model: got 'gpt', allowed is dummy | gguf | hf | hub | smollm2"),
        (
            "preset=bf17",
            "preset: got 'bf17', allowed is bf16 | none | small_memory; did you mean preset=bf16?",
        ),
    ],
)
def test_wrong_values(override: str, line: str) -> None:
    assert line_for(override) == line


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("lora.max_lora_per_batch=8", "lora.max_loras_per_batch"),
        ("max_loras_per_batch=8", "lora.max_loras_per_batch"),
        ("lroa.max_loras_per_batch=8", "lora.max_loras_per_batch"),
        ("modle=smollm2", "model"),
        ("presets=bf16", "preset"),
    ],
)
def test_misspelt_keys(override: str, meant: str) -> None:
    key, _, given = override.partition("=")
    line = line_for(override)
    assert line.startswith(f"{key}: no such key (given {given}), did you mean {meant}? allowed ")


def test_a_key_like_no_other_lists_its_neighbours() -> None:
    line = line_for("memory.xyzzy=1")
    assert line == (
        "memory.xyzzy: no such key (given 1); allowed in memory: fraction, page_size, "
        "max_kv_tokens, prefix_cache"
    )


def test_a_plus_does_not_smuggle_keys_in() -> None:
    cfg = compose("config", overrides=["+lora.extra=1", "+more=2"])
    assert list(surplus_keys(cfg)) == ["more", "lora.extra"]
    assert unknown_key("lora.extra", "1").startswith("lora.extra: no such key (given 1)")


def test_what_cannot_be_read_is_quoted() -> None:
    assert line_for("lora").startswith("lora: cannot be read (missing EQUAL")


def test_a_sweep_without_multirun_says_so() -> None:
    line = line_for("lora.max_loras_per_batch=4,8")
    assert line.startswith("lora.max_loras_per_batch: got several values 4,8; add --multirun")


def test_a_defect_is_not_explained_away() -> None:
    assert explain(TypeError("ours")) is None
