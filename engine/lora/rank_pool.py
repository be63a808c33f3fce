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
from engine.lora.adapter import AdapterLayout, HostAdapter
from engine.lora.base import scaled_b
from engine.lora.batch import Placement
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

    def write(self, start: int, stop: int, adapter: HostAdapter, layout: AdapterLayout) -> None:
        """Write rows `start`..`stop` whole: the adapter's pairs and vectors, zeros where it has
        none.

        What multiplies a pair is folded into B in float32 before the one cast to the pool's dtype.
        """
        self.a[start:stop].zero_()
        self.b[start:stop].zero_()
        column = 0
        for index, (member, width) in enumerate(zip(self.linear.members, self.widths, strict=True)):
            in_start, out_start = self.linear.shard_starts(index)
            own = self.b[start:stop, column : column + width]
            pair = adapter.pairs.get(member.name)
            vectors = adapter.vectors.get(member.name)
            if pair is not None:
                a = pair.a.narrow(1, in_start, self.linear.in_features)
                self.a[start : start + pair.rank, index].copy_(a)
                b = scaled_b(pair, vectors).narrow(0, out_start, width)
                own[: pair.rank].copy_(b.t())
            if vectors is not None and vectors.bias is not None:
                own[layout.bias_row].copy_(vectors.bias.narrow(0, out_start, width))
            if vectors is not None and vectors.gain is not None:
                own[layout.gain_row].copy_(vectors.gain.narrow(0, out_start, width) - 1)
            column += width


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

    def write(self, start: int, stop: int, adapter: HostAdapter, layout: AdapterLayout) -> None:
        """As for linear layers."""
        self.a[start:stop].zero_()
        self.b[start:stop].zero_()
        pair, vectors = adapter.pairs.get(self.name), adapter.vectors.get(self.name)
        if pair is not None:
            self.a[start : start + pair.rank].copy_(pair.a)
            self.b[start : start + pair.rank].copy_(scaled_b(pair, vectors).t())
        if vectors is not None and vectors.gain is not None and layout.gain_row is not None:
            self.b[start + layout.gain_row].copy_(vectors.gain - 1)


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

    def write(self, placement: Placement, adapter: HostAdapter) -> None:
        """Write the adapter's range in every layer, and its matrices."""
        for layer in self._layers:
            layer.write(placement.row_start, placement.row_stop, adapter, placement.layout)
        for module, index in zip(placement.layout.saved, placement.matrices, strict=True):
            self._matrices[index].copy_(adapter.saved[module])
