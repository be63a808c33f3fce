"""The base model as adapters see it: which modules there are, and what an adapter's tensors become
once the base's own weights are known.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from engine.errors import AdapterError, first_few
from engine.layers.linear import Linear
from engine.lora.adapter import EMBEDDING, HostAdapter, LoRAPair, LoRATarget, RowVectors
from engine.models.decoder import DecoderModel

CHUNK_COLUMNS = 512
NUM_SHOWN = 3


class AdapterBase:
    """Targets by module name, and access to the base's weights behind them."""

    def __init__(self, model: DecoderModel) -> None:
        self._dtype = model.dtype
        self._embedding = model.embedding
        self._places: dict[str, tuple[Linear, int]] = {}
        for linear in (*model.linears(), model.head):
            for index, member in enumerate(linear.members):
                self._places[member.name] = (linear, index)
        vocab_size, hidden_size = model.spec.vocab_size, model.spec.hidden_size
        self.targets: Mapping[str, LoRATarget] = {
            EMBEDDING: LoRATarget(EMBEDDING, vocab_size, hidden_size),
            **{
                name: LoRATarget(
                    name,
                    linear.total_in_features,
                    linear.members[index].width,
                    linear.bias is not None,
                )
                for name, (linear, index) in self._places.items()
            },
        }

    @torch.inference_mode()
    def settle(self, adapter: HostAdapter) -> HostAdapter:
        """The adapter with its frozen copies checked and dropped, and with the row vectors that
        follow from the base. Raises AdapterError with all reasons.
        """
        reasons = [
            f"a frozen copy of {module}'s weight differs from the base's; it belongs to another "
            "base, or to modules_to_save"
            for module, stored in adapter.frozen
            if not self._holds(module, stored)
        ]
        modules = dict.fromkeys([*adapter.pairs, *adapter.biases])
        vectors = {name: self._vectors(name, adapter) for name in modules}
        settled = replace(
            adapter,
            frozen=(),
            vectors={
                name: own
                for name, own in vectors.items()
                if own.gain is not None or own.bias is not None
            },
        )
        outside = [
            name
            for name, pair in adapter.pairs.items()
            if not _all_finite(self._dtype, pair.a, scaled_b(pair, vectors[name]))
        ]
        outside += [
            name
            for name, own in vectors.items()
            if not _all_finite(self._dtype, *(v for v in (own.gain, own.bias) if v is not None))
        ]
        outside += [
            name for name, stored in adapter.saved.items() if not _all_finite(self._dtype, stored)
        ]
        if outside:
            names = first_few(list(dict.fromkeys(outside)), NUM_SHOWN)
            reasons.append(f"numbers that {self._dtype} cannot hold once scaled, in {names}")
        if reasons:
            raise AdapterError(f"the adapter is refused: {'; '.join(reasons)}")
        return settled

    def _vectors(self, module: str, adapter: HostAdapter) -> RowVectors:
        pair, trained = adapter.pairs.get(module), adapter.biases.get(module)
        gain = bias = None
        if pair is not None and pair.magnitude is not None:
            gain = pair.magnitude.float() / self._row_norms(module, pair)
        if pair is not None and pair.bias is not None:
            bias = pair.bias.float() * pair.scaling
        if trained is not None:
            change = trained.float() - self._bias(module)
            bias = change if bias is None else bias + change
        return RowVectors(gain, bias)

    def _bias(self, module: str) -> torch.Tensor:
        linear, index = self._places[module]
        assert linear.bias is not None
        return torch.split(linear.bias, list(linear.widths))[index].float().cpu()

    def _row_norms(self, module: str, pair: LoRAPair) -> torch.Tensor:
        """Euclidean norms of the rows of W + scaling * b @ a, [out] float32 on the host."""
        b = pair.b.float() * pair.scaling
        squares = torch.zeros(b.shape[0], dtype=torch.float64)
        for start, columns in self._columns(module):
            part = columns.float().cpu() + b @ pair.a[:, start : start + columns.shape[1]].float()
            squares += part.double().square().sum(-1)
        return squares.sqrt().float()

    def _columns(self, module: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The module's matrix [out, in] in pieces of columns, each with its start."""
        num_columns = self.targets[module].in_features
        for start in range(0, num_columns, CHUNK_COLUMNS):
            stop = min(start + CHUNK_COLUMNS, num_columns)
            if module == EMBEDDING:
                yield start, self._embedding.weight[start:stop].t()
                continue
            linear, index = self._places[module]
            yield start, torch.split(linear.columns(start, stop), list(linear.widths))[index]

    def _holds(self, module: str, stored: torch.Tensor) -> bool:
        """Whether a stored matrix [vocab, hidden] is the base's, in the narrower of both dtypes."""
        matrix = stored.t() if module == EMBEDDING else stored
        return all(
            _equal(matrix[:, start : start + columns.shape[1]], columns.cpu())
            for start, columns in self._columns(module)
        )


def scaled_b(pair: LoRAPair, vectors: RowVectors | None) -> torch.Tensor:
    """b [out, rank] float32 with all that multiplies the pair's product."""
    b = pair.b.float() * pair.scaling
    gain = vectors.gain if vectors is not None else None
    return b if gain is None else b * gain.unsqueeze(-1)


def _equal(stored: torch.Tensor, own: torch.Tensor) -> bool:
    return torch.equal(stored.to(own.dtype), own) or torch.equal(stored, own.to(stored.dtype))


def _all_finite(dtype: torch.dtype, *tensors: torch.Tensor) -> bool:
    return all(bool(tensor.to(dtype).isfinite().all()) for tensor in tensors)
