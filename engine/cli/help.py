"""`--help`: usage, then every group with its choices and the commented YAML of the chosen one.

Reads the files of engine.conf as text. Hydra's own help composes the config some hundred times to
list the groups, which takes longer than anything else that a question may cost.
"""

from collections.abc import Sequence
from importlib.resources import files

import yaml  # type: ignore[import-untyped]

USAGE = """\
python -m engine [GROUP=FILE | GROUP.KEY=VALUE ...]    (or lora-engine)

  python -m engine                                        generate with the demo adapters
  python -m engine 'command.prompts=["Hello"]'            prompts of your own
  python -m engine lora=default lora.adapters.mine=DIR    adapters of your own
  python -m engine command=plan device=cuda               where the memory would go
  python -m engine --multirun lora.max_loras_per_batch=4,8,16
  python -m engine --cfg job                              the config as it would be used

--hydra-help lists all flags. Shell completion: eval "$(lora-engine -sc install=bash)"
"""


def wants_help(arguments: Sequence[str]) -> bool:
    return "--help" in arguments or "-h" in arguments


def help_text(arguments: Sequence[str]) -> str:
    """Usage and groups; `GROUP=FILE` among the arguments chooses which file of a group is shown."""
    conf = files("engine.conf")
    root = yaml.safe_load(conf.joinpath("config.yaml").read_text())
    chosen = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    parts = [USAGE]
    for entry in root["defaults"]:
        (group, default), *_ = entry.items() if isinstance(entry, dict) else [(entry, None)]
        if default is None or group.startswith("override "):
            continue
        folder = conf.joinpath(group)
        choices = sorted(path.name.removesuffix(".yaml") for path in folder.iterdir())
        choice = chosen.get(group) if chosen.get(group) in choices else default
        lines = folder.joinpath(f"{choice}.yaml").read_text().splitlines()
        parts.append(f"== {group}={choice}    (of {' | '.join(choices)})")
        parts += [f"  {line}" for line in lines if not line.startswith("# @package")]
        parts.append("")
    return "\n".join(parts).rstrip()
