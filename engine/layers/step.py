"""What one forward pass is about, handed explicitly from layer to layer; there is no global forward
context.

Shapes: T tokens of the step.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Step:
    """Inputs of a forward pass, on the model's device.

    `token_ids` and `positions` are int64 [T]. `attention` is the attention backend's own
    description of the step; `lora` are the adapters bound for the decoder's layers,
    `embedding_lora` those that change the embedding (None: base only).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: Any
    lora: Any
    embedding_lora: Any
