"""Model shapes that benchmarks run on, and the bytes that a decode step must read of them.

Numbers alone: knows nothing of tensors. bfloat16 throughout. The floor of a step is these bytes
over the card's copy bandwidth.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = 2
MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class Projection:
    """A fused projection [sum(widths), inputs]; `widths` are its members' outputs, in order."""

    name: str
    inputs: int
    widths: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return sum(self.widths)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder of the Llama family, head not tied."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Of one layer, in the order of a forward pass."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Projection("qkv", self.hidden, (q, kv, kv)),
            Projection("o", q, (self.hidden,)),
            Projection("gate_up", self.hidden, (self.ffn, self.ffn)),
            Projection("down", self.ffn, (self.hidden,)),
        )

    @property
    def step_weight_bytes(self) -> int:
        """What every step reads: all matrices and norms, the head, not the embedding."""
        matrices = sum(own.inputs * own.outputs for own in self.projections)
        numbers = self.layers * (matrices + 2 * self.hidden) + self.hidden
        return ITEM_BYTES * (numbers + self.vocab * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        return ITEM_BYTES * 2 * self.layers * self.kv_heads * self.head_dim

    def adapter_bytes(self, rank: int) -> int:
        """Of an adapter on all seven projections of each layer."""
        numbers = sum(len(own.widths) * own.inputs + own.outputs for own in self.projections)
        return ITEM_BYTES * self.layers * rank * numbers

    def step_bytes(self, ranks: Iterable[int], kv_tokens: int) -> int:
        """The fewest bytes of a decode step: weights, adapters of `ranks` in use, and `kv_tokens`
        keys and values of all rows together.
        """
        adapters = sum(map(self.adapter_bytes, ranks))
        return self.step_weight_bytes + adapters + kv_tokens * self.kv_bytes_per_token

    def config(self) -> dict[str, Any]:
        """As a config.json of Llama 3.1."""
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": rope,
            "tie_word_embeddings": False,
        }


LLAMA_8B = ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
TINY = ModelShape("tiny", 1, 64, 96, 4, 2, 16, 128, 8192)
