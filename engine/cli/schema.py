"""The dataclasses of engine.config as Hydra's schema, and the list of all keys they allow."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from engine.config import EngineConfig

OPEN_MAPPINGS = ("lora.adapters", "components")  # `lora.adapters.NAME=DIRECTORY` needs no `+`


def register_schema() -> None:
    """Store the root dataclass under the name that conf/config.yaml starts from."""
    schema = OmegaConf.structured(EngineConfig)
    for key in OPEN_MAPPINGS:
        OmegaConf.set_struct(OmegaConf.select(schema, key), False)
    ConfigStore.instance().store(name="schema", node=schema)


def config_keys(kind: Any = EngineConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the tree, groups and values, in the order of the dataclasses."""
    for name, hint in get_type_hints(kind).items():
        yield prefix + name
        if is_dataclass(hint):
            yield from config_keys(hint, f"{prefix}{name}.")


def surplus_keys(cfg: DictConfig, kind: Any = EngineConfig, prefix: str = "") -> Iterator[str]:
    """Keys of `cfg` that no dataclass has; `+key=value` gets them past Hydra's own check."""
    known = {field.name for field in fields(kind)}
    yield from (f"{prefix}{name}" for name in map(str, cfg) if name not in known)
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from surplus_keys(cfg[name], hint, f"{prefix}{name}.")
