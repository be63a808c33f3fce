"""The rank pool: one set of A and B matrices per linear layer whose rows are ranks.

An adapter owns one contiguous row range, as long as its own rank (up to a small alignment), the
same in every layer. Ranges in use never move; a range is written whole on load. Who may own one is
the slots' business.
"""

from typing import Any

import torch

from engine.device import Device
from engine.layers.linear import Linear, LinearDelta
from engine.layers.opset import OpSet
from engine.lora.adapter import HostAdapter
from engine.lora.batch import LoRABatch
from engine.memory.ledger import MemoryLedger, Receipt
from engine.models.decoder import DecoderModel

ROW_ALIGNMENT = 8


def aligned_rank(rank: int) -> int:
    """Rows that an adapter of `rank` occupies."""
    return -(-rank // ROW_ALIGNMENT) * ROW_ALIGNMENT


class RankRanges:
    """First-fit allocator of row ranges. Knows starts and lengths, not tensors."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._lengths: dict[int, int] = {}

    def find(self, length: int, without: frozenset[int] = frozenset()) -> int | None:
        """Start of the first free run of `length` rows, as if the ranges at `without` were free; or
        None.
        """
        position = 0
        for start in sorted(self._lengths):
            if start in without:
                continue
            if start - position >= length:
                return position
            position = start + self._lengths[start]
        return position if self.num_rows - position >= length else None

    def take(self, length: int) -> int | None:
        """Own the first free run of `length` rows (>= 1); None and nothing taken if there is
        none.
        """
        assert length >= 1
        start = self.find(length)
        if start is not None:
            self._lengths[start] = length
        return start

    def give_back(self, start: int) -> None:
        """Free the range that begins at `start`."""
        del self._lengths[start]

    @property
    def taken(self) -> dict[int, int]:
        """Start to length of every range in use."""
        return dict(self._lengths)


class LinearLoRA(LinearDelta):
    """One linear layer's part of the pool: `a` [rows, members, local in], `b` [rows, sum of local
    widths].
    """

    def __init__(self, linear: Linear, num_rows: int, dtype: torch.dtype, device: Device) -> None:
        self.linear = linear
        self.ops: OpSet = linear.ops
        self.widths = linear.widths
        shape = (num_rows, len(linear.members), linear.in_features)
        self.a = device.zeros(shape, dtype)
        self.b = device.zeros((num_rows, sum(linear.widths)), dtype)
        self._batch: LoRABatch | None = None
        self._bound: tuple[Any, ...] = ()

    @staticmethod
    def bytes_per_row(linear: Linear, dtype: torch.dtype) -> int:
        """Bytes that one rank row costs in this layer."""
        return (len(linear.members) * linear.in_features + sum(linear.widths)) * dtype.itemsize

    def add(self, x: torch.Tensor, y: torch.Tensor, batch: LoRABatch) -> None:
        """y [T, O] += the bound adapters' deltas of x [T, I]."""
        if batch is not self._batch:
            self._batch = batch
            self._bound = self.ops.bind_lora(self.a, self.b, self.widths, batch.runs)
        self.ops.add_lora(x, y, self._bound)

    def write(self, start: int, length: int, adapter: HostAdapter) -> None:
        """Write rows `start`..`start + length` whole: the adapter's pairs, zeros where it has none.

        The scaling is folded into B in float32 before the one cast to the pool's dtype.
        """
        rows = slice(start, start + length)
        self.a[rows].zero_()
        self.b[rows].zero_()
        column = 0
        for index, (member, width) in enumerate(zip(self.linear.members, self.widths, strict=True)):
            pair = adapter.pairs.get(member.name)
            if pair is not None:
                rank = pair.a.shape[0]
                own = slice(start, start + rank)
                in_start, out_start = self.linear.shard_starts(index)
                a = pair.a.narrow(1, in_start, self.linear.in_features)
                b = pair.b.narrow(0, out_start, width).float().mul(pair.scaling)
                self.a[own, index].copy_(a)
                self.b[own, column : column + width].copy_(b.t())
            column += width


class RankPool:
    """The pool over all linear layers of a model, attached to them as deltas."""

    def __init__(
        self, model: DecoderModel, num_rows: int, device: Device, ledger: MemoryLedger
    ) -> None:
        """Reserve, allocate and attach. Raises CapacityError when the budget does not hold it."""
        linears = list(model.linears())
        self.bytes_per_row = sum(
            LinearLoRA.bytes_per_row(linear, model.dtype) for linear in linears
        )
        self.num_rows = num_rows
        self.receipt: Receipt = ledger.reserve(
            "lora_manager", self.bytes_per_row * num_rows, f"rank pool of {num_rows} rows"
        )
        self._layers = [LinearLoRA(linear, num_rows, model.dtype, device) for linear in linears]
        for linear, layer in zip(linears, self._layers, strict=True):
            linear.delta = layer

    def write(self, start: int, length: int, adapter: HostAdapter) -> None:
        """Write the range in every layer."""
        for layer in self._layers:
            layer.write(start, length, adapter)
