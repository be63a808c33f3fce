"""Adapters of one layer's experts in the pool, and which of them each token of a step uses.

Shapes: E experts, H hidden, F the experts' inner width, S slots (adapters that can be resident), T
tokens, U most adapters of a token. An adapter of rank r that changes n experts owns one extent of
the layer's heap, with four sections, each of matrices whose rows are ranks: gate_up.a [n, M, r, H]
(M = 1: gate and up share one), gate_up.b [n, 2, r, F] (gate first), down.a [n, r, F] and down.b
[n, r, H]. What all its experts share is there once, with a stride of 0. Scaling is in the b's.
Knows nothing of who owns which slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Columns of `spans`: rank, M, then start and stride of each section, in numbers of the heap.
NUM_SPANS = 10
RANK, A_MEMBERS, FIRST_SECTION = 0, 1, 2
GATE_UP_A, GATE_UP_B, DOWN_A, DOWN_B = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """One layer's pool: `heap` [numbers] in the model's dtype; `spans` int64 [S, NUM_SPANS];
    `positions` int32 [S, E], an expert's place in the sections of the slot's adapter, -1: the
    adapter does not change it. Ranks are at most `max_rank`.
    """

    heap: torch.Tensor
    spans: torch.Tensor
    positions: torch.Tensor
    max_rank: int


@dataclass(frozen=True, slots=True)
class ExpertUses:
    """`slots` int32 [U, T], -1: none; `weights` float32 [U, T], what an adapter counts for."""

    slots: torch.Tensor
    weights: torch.Tensor

    def first(self, num_tokens: int) -> "ExpertUses":
        """Those of the first tokens, as views."""
        return ExpertUses(self.slots[:, :num_tokens], self.weights[:, :num_tokens])


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """Views of one adapter's matrices for one expert: `gate_up_a` [M, r, H], `gate_up_b` [2, r, F],
    `down_a` [r, F], `down_b` [r, H].
    """

    gate_up_a: torch.Tensor
    gate_up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor


def section_shapes(rank: int, a_members: int, hidden: int, ffn: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of one expert's matrices in the four sections, in their order."""
    return (a_members, rank, hidden), (2, rank, ffn), (rank, ffn), (rank, hidden)


def expert_pair(bank: ExpertBank, slot: int, expert: int, hidden: int, ffn: int) -> ExpertPair:
    """The slot's matrices for an expert that it changes. Reads tables: for host memory."""
    rank, a_members, *sections = bank.spans[slot].tolist()
    position = int(bank.positions[slot, expert])
    return ExpertPair(
        *_views(bank.heap, sections, position, section_shapes(rank, a_members, hidden, ffn))
    )


def _views(
    heap: torch.Tensor, sections: list[int], position: int, shapes: tuple[tuple[int, ...], ...]
) -> Iterator[torch.Tensor]:
    for index, shape in enumerate(shapes):
        start = sections[2 * index] + position * sections[2 * index + 1]
        yield heap[start : start + torch.Size(shape).numel()].view(shape)
