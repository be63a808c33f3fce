"""What the tests of the LoRA kernels share: tables on the device, mixed uses, random tensors."""

from collections.abc import Sequence

import torch

from engine.kernels.lora_tables import LoRATables, TokenUse

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = [torch.float32, torch.bfloat16]
POOL_ROWS, MAX_ITEMS, MAX_TOKENS = 160, 32, 96


def make_tables(
    uses: Sequence[TokenUse], max_tokens: int = MAX_TOKENS, max_items: int = MAX_ITEMS
) -> LoRATables:
    host = LoRATables.empty(max_tokens, max_items, 8, torch.device("cpu"))
    host.fill(uses)
    tables = LoRATables.empty(max_tokens, max_items, 8, DEVICE)
    tables.copy_from(host)
    return tables


def random(shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def some_uses(tokens: int) -> list[TokenUse]:
    """Adapters of 1 to 3 blocks, a shared one, two on one token, weights, base tokens between."""
    uses = [TokenUse(0, 16, 64, 0.5), TokenUse(tokens - 1, 144, 160, -2.0)]
    uses += [TokenUse(token, 64, 96) for token in range(2, tokens, 3)]
    return [*uses, TokenUse(tokens // 2, 0, 16, 0.25)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
