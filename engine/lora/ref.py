"""Names and identities of adapters. A `lora_id` exists once per load: never a name, a path or user
input.
"""

import uuid
from dataclasses import dataclass, field

from engine.lora.adapter import LoadReport

# In the place of a path: the load came from tensors in memory.
FROM_TENSORS = "tensors"


@dataclass(frozen=True, slots=True)
class LoRARef:
    """One load of one adapter. Caches, slots, use counts and logs are keyed by `lora_id` only."""

    name: str
    path: str
    pinned: bool = False
    lora_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class LoRAStatus:
    """What has become of a load: its rank, whether it has its place in the pool, and how many open
    requests hold it.
    """

    ref: LoRARef
    rank: int
    resident: bool
    num_open: int


@dataclass(frozen=True, slots=True)
class LoRAUse:
    """One load's part in a request: `weight` multiplies what the adapter adds to each layer."""

    lora_id: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LoRAUpdateOutput:
    """Answer to load and unload: `loaded_adapters` maps name to path after the operation; `report`
    is a successful load's.
    """

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str] = field(default_factory=dict)
    report: LoadReport | None = None
