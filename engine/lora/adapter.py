"""An adapter in host memory, by the modules of the base that it changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
# Stands in the name of every expert's projection: "model.layers.0.mlp.experts.3.gate_proj".
EXPERTS = ".experts."


class Part(Enum):
    """Parts of the model that adapters are bound to apart: the embedding sees all tokens' ids, the
    layers (and their experts, which only some adapters change) all tokens' hidden states, the head
    only those whose logits are wanted.
    """

    embedding = "embedding"
    layers = "layers"
    experts = "experts"
    head = "head"

    @classmethod
    def of(cls, module: str) -> "Part":
        if EXPERTS in module:
            return cls.experts
        return {EMBEDDING: cls.embedding, HEAD: cls.head}.get(module, cls.layers)


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """A module of the base by its split name, "model.layers.0.self_attn.q_proj".

    The embedding's input is a token id: `in_features` is the vocabulary.
    """

    module: str
    in_features: int
    out_features: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """delta(x) = scaling * (b @ a @ x + bias); `a` [rank, in], `b` [out, rank], dtypes as stored.

    `bias` [out] is lora_B's own. With `magnitude` [out] (DoRA) the module's output without the
    base's bias is magnitude / row norm of (W + scaling * b @ a) times as long.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    bias: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class RowVectors:
    """What a module's output gets beside the pair's product: y * gain + bias, each [out] float32
    or None. `gain` acts on the base's output without its bias, and on the pair's product.
    """

    gain: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """An adapter's extent in the pool of experts, the same in every layer: `rank` (the largest of
    its experts' pairs) by `num_experts` (the most that it changes in one layer).

    `a_members` is 1 if gate and up share their A everywhere. `shared` says of each section, as in
    `engine.kernels.expert_bank`, whether all experts of each layer have the same matrix there.
    """

    rank: int
    num_experts: int
    a_members: int
    shared: tuple[bool, bool, bool, bool]


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """An adapter's rows in the pool: `rank` of them (the largest of its pairs, those of experts
    apart; 0 if it has no other), then, where it has them, one of biases and one of gains - 1, each
    a row of B. `parts` are those that rows change; `saved` the modules with a matrix of their own;
    `experts` its extent in the pool of experts, None if it changes none.
    """

    rank: int
    bias_row: int | None
    gain_row: int | None
    parts: frozenset[Part]
    saved: tuple[str, ...]
    experts: ExpertLayout | None = None

    @property
    def num_rows(self) -> int:
        return self.rank + (self.bias_row is not None) + (self.gain_row is not None)


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """All that a file holds. A pair of a fused module counts once in `num_pairs_read`.

    `biases` replace the base's, `saved` whole matrices [vocab, hidden] replace the embedding's or
    the head's, `frozen` ones should equal the base's. `vectors` follow from these and the base, see
    `engine.lora.base`.
    """

    pairs: Mapping[str, LoRAPair]
    num_pairs_read: int
    num_pairs_applied: int
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    saved: Mapping[str, torch.Tensor] = field(default_factory=dict)
    frozen: Sequence[tuple[str, torch.Tensor]] = ()
    vectors: Mapping[str, RowVectors] = field(default_factory=dict)

    @property
    def layout(self) -> AdapterLayout:
        """Its rows in the pool."""
        rank = max(pair.rank for pair in self.pairs.values())
        has_bias = any(own.bias is not None for own in self.vectors.values())
        has_gain = any(own.gain is not None for own in self.vectors.values())
        return AdapterLayout(
            rank,
            rank if has_bias else None,
            rank + has_bias if has_gain else None,
            frozenset(Part.of(module) for module in (*self.pairs, *self.vectors)),
            tuple(self.saved),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored tensors; what members of a fused pair share counts once."""
        tensors = [*self.biases.values(), *self.saved.values()]
        for pair in self.pairs.values():
            tensors += [pair.a, pair.b]
            tensors += [own for own in (pair.bias, pair.magnitude) if own is not None]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def report(self, seconds: float) -> "LoadReport":
        """What was read and applied."""
        ranks = [pair.rank for pair in self.pairs.values()]
        names = dict.fromkeys([*self.pairs, *self.biases, *self.saved])
        return LoadReport(
            self.num_pairs_read,
            self.num_pairs_applied,
            tuple(sorted({name.rpartition(".")[2] for name in names})),
            len({name.split(".")[2] for name in names if Part.of(name) is Part.layers}),
            min(ranks),
            max(ranks),
            sum(pair.magnitude is not None for pair in self.pairs.values()),
            len(self.biases) + sum(pair.bias is not None for pair in self.pairs.values()),
            len(self.saved),
            self.num_bytes,
            seconds,
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load read and applied; magnitudes are DoRA's, biases trained ones of either kind."""

    num_pairs_read: int
    num_pairs_applied: int
    modules: tuple[str, ...]
    num_layers: int
    min_rank: int
    max_rank: int
    num_magnitudes: int
    num_biases: int
    num_saved_modules: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        ranks = dict.fromkeys((self.min_rank, self.max_rank))
        extras = (
            (self.num_magnitudes, "magnitudes"),
            (self.num_biases, "biases"),
            (self.num_saved_modules, "saved modules"),
        )
        more = "".join(f"{count} {what}, " for count, what in extras if count)
        return (
            f"{self.num_pairs_applied} of {self.num_pairs_read} pairs applied, {more}"
            f"{', '.join(self.modules)} in {self.num_layers} layers, "
            f"rank {' to '.join(map(str, ranks))}, {self.num_bytes:,} bytes, {self.seconds:.2f} s"
        )
