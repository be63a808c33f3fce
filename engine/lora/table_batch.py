"""The adapters of one step as tables for the Triton kernels: whole blocks of pool rows by token.

Which rows an adapter owns is its placement's business, what the tables look like the kernels'.
"""

from collections.abc import Sequence

import torch

from engine.device import Device
from engine.kernels.fused_lora import TableWork, table_work
from engine.kernels.lora_tables import BLOCK, TokenUse
from engine.lora.adapter import Part
from engine.lora.batch import Portion, bind_saved, find_users
from engine.lora.graph_batch import GraphBatch
from engine.models.decoder import DecoderModel


class TableBinder:
    """Makes tables, with scratch memory for the layers of `model`."""

    def __init__(self, model: DecoderModel, device: Device) -> None:
        linears = (*model.linears(), model.head)
        self._shapes = frozenset((len(own.members), own.in_features) for own in linears)
        self._num_sms = device.num_multiprocessors
        self._device: torch.device = device.torch_device
        self._dtype = model.dtype

    def bind(self, part: Part, portions: Sequence[Portion], num_tokens: int) -> TableWork | None:
        """The work of the layers or the head in a step of `num_tokens`; None if no portion's
        adapter changes them.
        """
        users = find_users(part, portions)
        if not users.with_rows and not users.with_saved:
            return None
        uses = [_use(own) for own in users.with_rows]
        saved = bind_saved(users, self._device, self._dtype)
        return table_work(uses, num_tokens, saved, self._shapes, self._num_sms, self._device)

    def layer_uses(self, portions: Sequence[Portion]) -> list[TokenUse]:
        """The pool rows that the portions use in the layers."""
        return [_use(own) for own in find_users(Part.layers, portions).with_rows]

    def new_graph_batch(self, max_tokens: int, max_rank: int) -> GraphBatch:
        return GraphBatch(self._shapes, self._num_sms, max_tokens, max_rank, self._device)

    def graph_batch_bytes(self, max_tokens: int, max_rank: int) -> int:
        return GraphBatch.num_bytes(self._shapes, max_tokens, max_rank)


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
