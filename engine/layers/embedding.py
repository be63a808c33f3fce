"""Token embedding and output head, tied or not."""

from typing import Any

import torch
import torch.nn.functional as F

from engine.layers.build import BuildContext
from engine.layers.linear import Cut, Delta, Linear, Member
from engine.layers.weight_slot import WeightSlot


class Embedding:
    """`weight` [vocab, hidden], looked up by token id."""

    def __init__(self, ctx: BuildContext, name: str, vocab_size: int, hidden_size: int) -> None:
        self.name = name
        self.weight = ctx.empty(vocab_size, hidden_size)
        self.delta: Delta | None = None

    def __call__(self, token_ids: torch.Tensor, lora: Any = None) -> torch.Tensor:
        """token_ids [T] -> [T, hidden], with the delta of the adapters bound in `lora`."""
        y = F.embedding(token_ids, self.weight)
        if self.delta is not None and lora is not None:
            self.delta.add(token_ids, y, lora)
        return y

    def slots(self) -> dict[str, WeightSlot]:
        return {f"{self.name}.weight": WeightSlot.whole(self.weight)}


class OutputHead(Linear):
    """hidden [N, hidden] -> logits [N, vocab]. A tied head shares the embedding's weight until it
    is packed, and then owns a copy, for the embedding stays as it is.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied_to: Embedding | None,
    ) -> None:
        self.tied = tied_to is not None
        shared = tied_to.weight if tied_to is not None else None
        members = (Member(name, vocab_size),)
        super().__init__(ctx, hidden_size, members, bias=False, cut=Cut.column, weight=shared)

    def slots(self) -> dict[str, WeightSlot]:
        return {} if self.tied else super().slots()
