"""What one forward pass is about, handed explicitly from layer to layer; there is no global forward
context.

Shapes: T tokens of the step, N rows whose logits are wanted.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Step:
    """Inputs of a forward pass, on the model's device.

    `token_ids` and `positions` are int64 [T]; `logit_rows` int64 [N] are the tokens whose logits
    are wanted. `attention` is the attention backend's own description of the step, `lora` the bound
    adapters' (None: base only).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    attention: Any
    lora: Any
