"""Token embedding and output head, tied or not."""

import torch
import torch.nn.functional as F

from engine.layers.build import BuildContext
from engine.layers.weight_slot import WeightSlot


class Embedding:
    """`weight` [vocab, hidden], looked up by token id."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        self.weight = ctx.empty(vocab_size, hidden_size)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> [T, hidden]."""
        return F.embedding(token_ids, self.weight)

    def slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": WeightSlot.whole(self.weight)}


class OutputHead:
    """Logits from hidden states; a tied head shares the embedding's weight until it is packed."""

    def __init__(
        self, ctx: BuildContext, vocab_size: int, hidden_size: int, tied_to: Embedding | None
    ) -> None:
        self.ops = ctx.ops
        self.tied = tied_to is not None
        self.weight = tied_to.weight if tied_to is not None else ctx.empty(vocab_size, hidden_size)

    def pack(self) -> None:
        """As for linear layers; a tied head then owns a copy, for the embedding stays as it is."""
        self.weight = self.ops.pack_weight(self.weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] -> logits [N, vocab]."""
        return self.ops.linear(hidden, self.weight, None)

    def slots(self, name: str) -> dict[str, WeightSlot]:
        return {} if self.tied else {f"{name}.weight": WeightSlot.whole(self.weight)}
