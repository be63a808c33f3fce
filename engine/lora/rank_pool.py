"""The rank pool: one set of A and B matrices per layer whose rows are ranks.

An adapter owns one contiguous row range, as long as its own rank (up to a small alignment), the
same in every layer, in the embedding and in the head. Ranges in use never move; a range is written
whole on load. Vectors of an adapter (biases, DoRA gains) are rows of B whose rows of A are zero.
Who may own a range is the slots' business.
"""

from typing import Any

import torch

from engine.device import Device
from engine.kernels.lora import LoRAWork
from engine.layers.embedding import Embedding
from engine.layers.linear import Delta, Linear
from engine.layers.opset import OpSet
from engine.lora.adapter import HostAdapter
from engine.lora.batch import Placement
from engine.lora.pool_copies import Arrival, PoolCopies
from engine.lora.pool_image import MemberRows, PoolImage, layer_image, saved_image
from engine.memory.ledger import MemoryLedger, Receipt
from engine.models.decoder import DecoderModel


class LinearLoRA(Delta):
    """One linear layer's part of the pool: `a` [rows, members, local in], `b` [rows, sum of local
    widths]. `matrices` [saved, vocab, hidden] are the head's.
    """

    def __init__(
        self,
        linear: Linear,
        num_rows: int,
        dtype: torch.dtype,
        device: Device,
        matrices: torch.Tensor | None = None,
    ) -> None:
        self.linear = linear
        self.ops: OpSet = linear.ops
        self.widths = linear.widths
        shape = (num_rows, len(linear.members), linear.in_features)
        self.a = device.zeros(shape, dtype)
        self.b = device.zeros((num_rows, sum(linear.widths)), dtype)
        self._matrices = matrices
        self._work: Any = None
        self._bound: Any = None

    @staticmethod
    def numbers_per_row(linear: Linear) -> int:
        """Numbers that one rank row costs in this layer."""
        return len(linear.members) * linear.in_features + sum(linear.widths)

    def add(self, x: torch.Tensor, y: torch.Tensor, work: Any) -> None:
        """y [T, O] += the bound adapters' deltas of x [T, I]. `work`: what the ops' `bind_lora`
        takes.
        """
        if work is not self._work:
            self._work = work
            self._bound = self.ops.bind_lora(self.a, self.b, self.widths, self.linear.bias, work)
        if not work.saved:
            self.ops.add_lora(x, y, self._bound)
            return
        assert self._matrices is not None
        deltas = self.ops.saved_deltas(x, y, self._matrices, work)
        self.ops.add_lora(x, y, self._bound)
        for rows, delta in zip(work.saved, deltas, strict=True):
            y.index_add_(0, rows.tokens, delta)

    def members(self) -> list[MemberRows]:
        """The layer's projections as an image lays them out."""
        found, column = [], 0
        for index, (member, width) in enumerate(zip(self.linear.members, self.widths, strict=True)):
            found.append(MemberRows(member.name, column, width, *self.linear.shard_starts(index)))
            column += width
        return found


class EmbeddingLoRA(Delta):
    """The embedding's part: `a` [rows, vocab], `b` [rows, hidden], `matrices` as the head's."""

    def __init__(
        self,
        embedding: Embedding,
        ops: OpSet,
        num_rows: int,
        device: Device,
        matrices: torch.Tensor,
    ) -> None:
        self.ops = ops
        self.name = embedding.name
        vocab_size, hidden_size = embedding.weight.shape
        self.a = device.zeros((num_rows, vocab_size), embedding.weight.dtype)
        self.b = device.zeros((num_rows, hidden_size), embedding.weight.dtype)
        self._matrices = matrices

    def add(self, x: torch.Tensor, y: torch.Tensor, work: LoRAWork) -> None:
        """y [T, hidden] += the bound adapters' deltas of token ids x [T]."""
        deltas = self.ops.saved_deltas(x, y, self._matrices, work)
        self.ops.add_embedding_lora(x, y, self.a, self.b, work)
        for rows, delta in zip(work.saved, deltas, strict=True):
            y.index_add_(0, rows.tokens, delta)

    def members(self) -> list[MemberRows]:
        """The embedding as an image lays it out."""
        return [MemberRows(self.name, 0, self.b.shape[1], 0, 0)]


class RankPool:
    """The pool over embedding, linear layers and head of a model, attached to them as deltas."""

    def __init__(
        self,
        model: DecoderModel,
        num_rows: int,
        num_matrices: int,
        device: Device,
        ledger: MemoryLedger,
    ) -> None:
        """Reserve, allocate and attach. Raises CapacityError when the budget does not hold it."""
        linears = list(model.linears())
        vocab_size, hidden_size = model.spec.vocab_size, model.spec.hidden_size
        numbers = sum(LinearLoRA.numbers_per_row(linear) for linear in (*linears, model.head))
        self.bytes_per_row = (numbers + vocab_size + hidden_size) * model.dtype.itemsize
        matrix_bytes = vocab_size * hidden_size * model.dtype.itemsize
        self.num_rows = num_rows
        self.receipt: Receipt = ledger.reserve(
            "lora_manager",
            self.bytes_per_row * num_rows + matrix_bytes * num_matrices,
            f"rank pool of {num_rows} rows, {num_matrices} matrices of saved modules",
        )
        self._host_visible = device.host_visible
        self._copies = PoolCopies(device)
        self._matrices = device.zeros((num_matrices, vocab_size, hidden_size), model.dtype)
        self._layers: list[LinearLoRA | EmbeddingLoRA] = []
        for linear in (*linears, model.head):
            matrices = self._matrices if linear is model.head else None
            layer = LinearLoRA(linear, num_rows, model.dtype, device, matrices)
            linear.delta = layer
            self._layers.append(layer)
        embedding = EmbeddingLoRA(model.embedding, model.head.ops, num_rows, device, self._matrices)
        model.embedding.delta = embedding
        self._layers.append(embedding)

    def image(self, adapter: HostAdapter, num_rows: int) -> PoolImage:
        """`num_rows` rows for the adapter, in host memory; any thread may make it."""
        layout, pinned, dtype = adapter.layout, not self._host_visible, self._matrices.dtype
        layers = [
            layer_image(adapter, layout, own.members(), num_rows, own.a.shape[-1], dtype, pinned)
            for own in self._layers
        ]
        saved = {
            module: saved_image(matrix, dtype, pinned) for module, matrix in adapter.saved.items()
        }
        return PoolImage(layout, layers, saved)

    def write(self, placement: Placement, image: PoolImage) -> Arrival:
        """Begin to write the adapter's range in every layer, and its matrices; steps that are under
        way may still read what lay there. It must not be used before it has arrived.
        """
        rows = slice(placement.row_start, placement.row_stop)
        with self._copies.begin():
            for layer, own in zip(self._layers, image.layers, strict=True):
                _write(layer.a[rows], None if own is None else own.a)
                _write(layer.b[rows], None if own is None else own.b)
            for module, index in zip(placement.layout.saved, placement.matrices, strict=True):
                _write(self._matrices[index], image.saved[module])
        return self._copies.end()


def _write(target: torch.Tensor, source: torch.Tensor | None) -> None:
    if source is None:
        target.zero_()
    else:
        target.copy_(source.view_as(target), non_blocking=True)
