"""LoRA deltas over the rank pool by the Triton kernels: a shrink and an expand for each layer.

A step's tokens use the pool by tables, whose cost follows the blocks of rows that are in use.
Knows nothing of who owns which rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.lora import SavedRows
from engine.kernels.lora_expand import expand_add
from engine.kernels.lora_shrink import ShrinkWorkspace, shrink, shrink_workspace
from engine.kernels.lora_tables import LoRATables, TokenUse


@dataclass(frozen=True, slots=True)
class TableWork:
    """What a step asks of each layer; `saved` is the head's."""

    tables: LoRATables
    workspace: ShrinkWorkspace
    saved: tuple[SavedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class BoundTables:
    """A step's work with one layer's pool; `base_bias` [O] is part of y before the deltas."""

    work: TableWork
    a: torch.Tensor
    b: torch.Tensor
    widths: tuple[int, ...]
    base_bias: torch.Tensor | None


def table_work(
    uses: Sequence[TokenUse],
    num_tokens: int,
    saved: tuple[SavedRows, ...],
    shapes: Iterable[tuple[int, int]],
    num_sms: int,
    device: torch.device,
) -> TableWork:
    """Work of `uses` in a step of `num_tokens`, for layers of `shapes` (M, I)."""
    tables = LoRATables.of(uses, num_tokens, device)
    max_items = tables.blocks.max_items
    workspace = shrink_workspace(max_items=max_items, shapes=shapes, num_sms=num_sms, device=device)
    return TableWork(tables, workspace, saved)


def bind_lora(
    a: torch.Tensor,
    b: torch.Tensor,
    widths: tuple[int, ...],
    base_bias: torch.Tensor | None,
    work: TableWork,
) -> BoundTables:
    """`work` with a [R, M, I] and b [R, O] of one layer, R in whole blocks for each adapter."""
    return BoundTables(work, a, b, widths, base_bias)


def add_lora(x: torch.Tensor, y: torch.Tensor, bound: BoundTables) -> None:
    """As `engine.kernels.lora.add_lora`, with sums in float32 and one rounding."""
    work = bound.work
    h = None
    if work.tables.blocks.max_items:
        h = shrink(x, bound.a, work.tables, work.workspace)
    expand_add(y, h, bound.b, work.tables, bound.widths, bound.base_bias)
