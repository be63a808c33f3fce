"""One job: config -> container -> command, and everything freed again, whichever way it ends.

Knows nothing of Hydra's command line. Torch and the container are imported inside the functions:
a config that is refused does not pay for them.
"""

import gc
import os
import traceback
from typing import cast

from omegaconf import DictConfig, OmegaConf

from engine.cli.explain import unknown_key
from engine.cli.schema import surplus_keys
from engine.commands.result import JobResult
from engine.config import EngineConfig
from engine.errors import ConfigError

# OpenMP reads this when torch is first imported. By default idle threads spin, which slows small
# batches several times over when another process wants the cores (docs/benchmarks).
IDLE_THREADS_SLEEP = ("OMP_WAIT_POLICY", "PASSIVE")


def run_job(cfg: DictConfig) -> JobResult:
    """Run the command that `cfg` names, in a container of its own.

    Raises ConfigError or an omegaconf error on a bad value and whatever the command raises; by then
    nothing of the container is alive, not even through the exception's traceback.
    """
    for key in surplus_keys(cfg):
        raise ConfigError(unknown_key(key, str(OmegaConf.select(cfg, key))))
    config = cast(EngineConfig, OmegaConf.to_object(cfg))
    os.environ.setdefault(*IDLE_THREADS_SLEEP)
    from engine import wiring
    from engine.commands import ON_CONFIG, find_command
    from engine.server.logs import log_to_stderr

    log_to_stderr(config.log_level, json=config.server.json_log)
    name, container = config.command.name, None
    try:
        if name in ON_CONFIG:
            return find_command(name)(config)
        container = wiring.build(config)
        return find_command(name)(container)
    except Exception as error:
        _clear_frames(error)
        raise
    finally:
        if container is not None:
            container.reset_singletons()
            del container
        _collect()


def _clear_frames(error: BaseException) -> None:
    """Drop the locals of finished frames: they would keep tensors alive as long as the error."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        pending += [link.__cause__, link.__context__]


def _collect() -> None:
    """Free what only cycles hold, then hand cached device memory back."""
    gc.collect()
    import torch

    torch.cuda.empty_cache()  # does nothing where CUDA was never used
