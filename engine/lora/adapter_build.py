"""From an adapter's tensors and config to a HostAdapter: every tensor is applied, or all reasons
against it are given at once.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from loguru import logger

from engine.errors import AdapterError, first_few, shown
from engine.lora.adapter import HEAD, HostAdapter, LoRAPair, LoRATarget
from engine.lora.names import PEFT_PREFIX, Key, Kind, explain_unmatched, resolve, split_members
from engine.lora.peft_config import AdapterConfig, parse_config

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FLOATS8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
NUM_SHOWN = 3
MAX_REASONS = 8
MAX_REASON_CHARS = 320


@dataclass(slots=True)
class _Module:
    """The tensors that a file has for one module, which it spells `path`."""

    name: str
    path: str
    members: tuple[LoRATarget, ...]
    tensors: dict[Kind, torch.Tensor] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, str]:
        """Names that patterns of the config may match."""
        return self.path.removeprefix(PEFT_PREFIX), self.name

    @property
    def widths(self) -> list[int]:
        return [member.out_features for member in self.members]

    @property
    def has_pair(self) -> bool:
        return any(kind in self.tensors for kind in (Kind.a, Kind.b, Kind.b_bias, Kind.magnitude))


def build_adapter(
    where: str,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    targets: Mapping[str, LoRATarget],
) -> HostAdapter:
    """Check and sort the tensors. Raises AdapterError with `where` and all reasons."""
    parsed, reasons = parse_config(config)
    modules, unmatched = _modules(tensors, targets)
    reasons += unmatched
    if not tensors:
        reasons.append("the weights hold no tensor")
    elif not any(module.has_pair for module in modules):
        reasons.append("the weights hold no LoRA pair of the base's modules")
    faults = [fault for module in modules for fault in _tensor_faults(module)]
    if not faults:
        faults = [fault for module in modules for fault in _shape_faults(module)]
    reasons += _counted(faults, "faults of tensors")
    if parsed is not None:
        disagreements = [fault for module in modules for fault in _config_faults(module, parsed)]
        disagreements += _missing_saved(modules, parsed)
        reasons += _counted(disagreements, "disagreements with the config")
    if parsed is None or reasons:
        raise refusal(f"{where}: the adapter is refused", reasons)
    for key in parsed.unmatched_patterns([module.names for module in modules]):
        logger.warning("lora: {}: pattern key {!r} matches no module of the file", where, key)
    return _assemble(where, modules, parsed)


def refusal(where: str, reasons: list[str]) -> AdapterError:
    """One printable line, whatever a file has in it."""
    unique = list(dict.fromkeys(reasons))
    rest = len(unique) - MAX_REASONS
    told = [shown(reason, MAX_REASON_CHARS) for reason in unique[:MAX_REASONS]]
    told += [f"… and {rest} more reasons"] if rest > 0 else []
    return AdapterError(f"{shown(where, MAX_REASON_CHARS)}: {'; '.join(told)}")


def _modules(
    tensors: Mapping[str, torch.Tensor], targets: Mapping[str, LoRATarget]
) -> tuple[list[_Module], list[str]]:
    """Tensors by module, and the reasons against keys that name nothing of the base."""
    modules: dict[str, _Module] = {}
    adapters: dict[str, str] = {}
    unmatched: dict[str, list[str]] = defaultdict(list)
    for text, tensor in tensors.items():
        key = resolve(text, targets)
        if key is None:
            unmatched[explain_unmatched(text)].append(text)
            continue
        if key.kind in (Kind.a, Kind.b, Kind.b_bias, Kind.magnitude):
            adapters.setdefault(key.adapter, text)
        own = modules.setdefault(key.module, _new_module(key, targets))
        if key.path != own.path:
            unmatched[f"{key.module} is spelt in two ways"].append(text)
        elif key.kind in own.tensors:
            unmatched[f"{key.module}.{key.kind.value} is given twice"].append(text)
        else:
            own.tensors[key.kind] = tensor
    if len(adapters) > 1:
        unmatched["keys of several adapters, expected one"] = list(adapters.values())
    reasons = [f"{why}: {first_few(keys, NUM_SHOWN)}" for why, keys in unmatched.items()]
    return list(modules.values()), reasons


def _new_module(key: Key, targets: Mapping[str, LoRATarget]) -> _Module:
    members = tuple(targets[name] for name in split_members(key.module))
    return _Module(key.module, key.path, members)


def _counted(faults: list[str], what: str) -> list[str]:
    rest = [f"and {len(faults) - NUM_SHOWN} more {what}"] if len(faults) > NUM_SHOWN else []
    return faults[:NUM_SHOWN] + rest


# ---------------------------------------------------------------------- faults


def _tensor_faults(module: _Module) -> Iterator[str]:
    """What is wrong with the tensors by themselves, and sides that are missing."""
    for kind in (Kind.a, Kind.b):
        if module.has_pair and kind not in module.tensors:
            yield f"{module.name} has no {kind.value}"
    for kind, tensor in module.tensors.items():
        name = f"{module.name}.{kind.value}"
        num_dims = 2 if kind in (Kind.a, Kind.b, Kind.weight, Kind.frozen) else 1
        if tensor.is_meta or tensor.layout is not torch.strided:
            yield f"{name} is sparse or without data, expected a dense tensor"
        elif tensor.dtype not in FLOATS + FLOATS8:
            yield f"{name} has dtype {tensor.dtype}, expected a floating one"
        elif tensor.dim() != num_dims or 0 in tensor.shape:
            what = "a matrix" if num_dims == 2 else "a vector"
            yield f"{name} has shape {list(tensor.shape)}, expected {what}"
        elif tensor.nbytes > tensor.untyped_storage().nbytes():
            yield f"{name} shows {tensor.numel()} numbers and stores fewer; save a contiguous copy"
        elif not bool(tensor.float().isfinite().all()):
            yield f"{name} holds numbers that are not finite"


def _shape_faults(module: _Module) -> Iterator[str]:
    """Tensors that do not fit each other or the base. Called when all are sound by themselves."""
    width_in, width = module.members[0].in_features, sum(module.widths)
    if module.has_pair:
        a, b = module.tensors[Kind.a], module.tensors[Kind.b]
        if (a.shape[1], b.shape[0]) != (width_in, width) or a.shape[0] != b.shape[1]:
            yield (
                f"{module.name}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, expected "
                f"[rank, {width_in}] and [{width}, rank]"
            )
    for kind in (Kind.b_bias, Kind.magnitude, Kind.bias):
        tensor = module.tensors.get(kind)
        if tensor is not None and len(tensor) != width:
            yield f"{module.name}.{kind.value} has {len(tensor)} numbers, expected {width}"
    expected = [width, width_in] if module.name == HEAD else [width_in, width]
    for kind in (Kind.weight, Kind.frozen):
        tensor = module.tensors.get(kind)
        if tensor is not None and list(tensor.shape) != expected:
            yield (
                f"{module.name}.{kind.value} is {list(tensor.shape)}, the base's is {expected}; a "
                "resized vocabulary is not supported"
            )


def _config_faults(module: _Module, config: AdapterConfig) -> Iterator[str]:
    """Tensors that the config does not speak of, or speaks of and are missing."""
    own, name = module.tensors, module.name
    a = own.get(Kind.a)
    expected = config.rank_of(module.names)
    if a is not None and a.dim() == 2 and 0 not in a.shape and a.shape[0] != expected:
        yield f"{name} has rank {a.shape[0]}, the config says {expected}"
    for kind, field_name, is_set in (
        (Kind.magnitude, "use_dora", config.use_dora),
        (Kind.b_bias, "lora_bias", config.lora_bias),
    ):
        if module.has_pair and is_set != (kind in own):
            yield f"{name} has {'no ' if is_set else ''}{kind.value}, but {field_name}={is_set}"
    has_bias = all(member.has_bias for member in module.members)
    if Kind.bias in own and not has_bias:
        yield f"{name}.bias: the base has no bias there"
    elif Kind.bias in own and not _bias_allowed(module, config):
        yield f"{name}.bias is stored, but bias={config.bias!r}"
    elif config.bias != "none" and module.has_pair and has_bias and Kind.bias not in own:
        yield f"{name} has no trained bias, but bias={config.bias!r}"
    if _is_saved(module, config) and module.has_pair:
        yield f"{name} has a LoRA pair and is in modules_to_save"


def _bias_allowed(module: _Module, config: AdapterConfig) -> bool:
    return config.bias == "all" or (config.bias == "lora_only" and module.has_pair)


def _missing_saved(modules: list[_Module], config: AdapterConfig) -> Iterator[str]:
    stored = {m.name.rpartition(".")[2] for m in modules if Kind.weight in m.tensors}
    for name in config.saved_modules:
        if name not in stored:
            yield f"modules_to_save names {name}, the weights do not hold it"


def _is_saved(module: _Module, config: AdapterConfig) -> bool:
    return module.name.rpartition(".")[2] in config.saved_modules


# ---------------------------------------------------------------------- assembly


def _assemble(where: str, modules: list[_Module], config: AdapterConfig) -> HostAdapter:
    """One entry per projection; members of a fused module share A and cut the rest by width."""
    pairs: dict[str, LoRAPair] = {}
    biases: dict[str, torch.Tensor] = {}
    saved: dict[str, torch.Tensor] = {}
    frozen: list[tuple[str, torch.Tensor]] = []
    for module in modules:
        own = {kind: _copied(tensor) for kind, tensor in module.tensors.items()}
        for kind in (Kind.weight, Kind.frozen):
            if kind not in own:
                continue
            if kind is Kind.weight and _is_saved(module, config):
                saved[module.name] = own[kind]
            else:
                frozen.append((module.name, own[kind]))
        cut = {
            kind: torch.split(tensor, module.widths) for kind, tensor in own.items() if kind in _CUT
        }
        for index, member in enumerate(module.members):
            part = {kind: tensors[index] for kind, tensors in cut.items()}
            if member.module in pairs or member.module in biases:
                raise AdapterError(f"{where}: {member.module} is given twice, fused and on its own")
            if Kind.bias in part:
                biases[member.module] = part[Kind.bias]
            if module.has_pair:
                pairs[member.module] = LoRAPair(
                    own[Kind.a],
                    part[Kind.b],
                    config.scaling_of(module.names),
                    part.get(Kind.b_bias),
                    part.get(Kind.magnitude),
                )
    count = sum(module.has_pair for module in modules)
    return HostAdapter(pairs, count, count, biases, saved, tuple(frozen))


_CUT = (Kind.b, Kind.b_bias, Kind.magnitude, Kind.bias)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, float8 as float32.

    What safetensors reads is a map of the file: without the copy, a file that is overwritten in
    place would change a loaded adapter, and one that is cut short would end the process.
    """
    dtype = torch.float32 if tensor.dtype in FLOATS8 else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()
