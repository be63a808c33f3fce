"""The adapters of one step as tables for the Triton kernels: whole blocks of pool rows by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.fused_lora import TableWork, table_work
from engine.kernels.lora_tables import BLOCK, TokenUse
from engine.lora.adapter import Part
from engine.lora.batch import Portion, bind_saved, find_users


@dataclass(frozen=True, slots=True)
class TableLimits:
    """What the tables' scratch memory depends on: layers' (members, in_features), and the card's
    multiprocessors.
    """

    shapes: frozenset[tuple[int, int]]
    num_sms: int


def bind_tables(
    part: Part,
    portions: Sequence[Portion],
    num_tokens: int,
    limits: TableLimits,
    device: torch.device,
    dtype: torch.dtype,
) -> TableWork | None:
    """The work of the layers or the head in a step of `num_tokens`; None if no portion's adapter
    changes them.
    """
    users = find_users(part, portions)
    if not users.with_rows and not users.with_saved:
        return None
    uses = [_use(own) for own in users.with_rows]
    saved = bind_saved(users, device, dtype)
    return table_work(uses, num_tokens, saved, limits.shapes, limits.num_sms, device)


def _use(own: Portion) -> TokenUse:
    start, layout = own.placement.row_start, own.placement.layout
    gain, bias = layout.gain_row, layout.bias_row
    return TokenUse(
        own.start,
        start,
        start + -(-layout.rank // BLOCK) * BLOCK,
        own.weight,
        None if gain is None else start + gain,
        None if bias is None else start + bias,
        own.stop - own.start,
    )
