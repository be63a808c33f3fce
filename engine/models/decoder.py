"""The dense Llama family as one decoder: what differs between its members is data in the ModelSpec.

Owns the weights and their receipt. Knows nothing of pages, adapters or sampling.
"""

from collections.abc import Iterator
from typing import Any

import torch
from loguru import logger

from engine.config import ModelConfig
from engine.device import Device
from engine.errors import ConfigError
from engine.layers.attention import Attention, AttentionBackend, Rotation
from engine.layers.build import BuildContext
from engine.layers.embedding import Embedding, OutputHead
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.layers.opset import OpSet
from engine.layers.rotary import Rotary
from engine.layers.step import Step
from engine.layers.weight_slot import WeightSlot
from engine.memory.ledger import MemoryLedger, format_bytes
from engine.models.spec import ModelSpec
from engine.parallel.topology import Topology
from engine.weights.checkpoint import Checkpoint
from engine.weights.load import fill_randomly, load_weights


class DecoderLayer:
    """norm, attention, norm, MLP, with residuals."""

    def __init__(self, ctx: BuildContext, index: int, spec: ModelSpec) -> None:
        self.name = f"model.layers.{index}"
        self.input_norm = RMSNorm(ctx, spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(ctx, f"{self.name}.self_attn", index, spec)
        self.post_norm = RMSNorm(ctx, spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(
            ctx,
            f"{self.name}.mlp",
            spec.hidden_size,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            fused_names=spec.fused_projections,
        )

    def linears(self) -> tuple[Linear, ...]:
        return self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down

    def slots(self) -> dict[str, WeightSlot]:
        return (
            self.input_norm.slots(f"{self.name}.input_layernorm")
            | self.attention.slots()
            | self.post_norm.slots(f"{self.name}.post_attention_layernorm")
            | self.mlp.slots()
        )


class Decoder:
    """The layers of a model, parameters uninitialized until its slots are filled."""

    def __init__(self, ctx: BuildContext, spec: ModelSpec) -> None:
        self.embedding = Embedding(ctx, "model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self.layers = [DecoderLayer(ctx, index, spec) for index in range(spec.num_layers)]
        self.norm = RMSNorm(ctx, spec.hidden_size, spec.rms_norm_eps)
        tied_to = self.embedding if spec.tie_word_embeddings else None
        self.head = OutputHead(ctx, "lm_head", spec.vocab_size, spec.hidden_size, tied_to)
        self.rotary = Rotary(spec.rope, ctx.device, ctx.dtype)

    def slots(self) -> dict[str, WeightSlot]:
        """Every checkpoint tensor of the model and where it goes."""
        slots = self.embedding.slots()
        for layer in self.layers:
            slots |= layer.slots()
        return slots | self.norm.slots("model.norm") | self.head.slots()

    def pack(self) -> None:
        """Put the filled weights into the layout that the ops want, one by one."""
        for layer in self.layers:
            for linear in layer.linears():
                linear.pack()
        self.head.pack()

    def num_bytes(self, device_type: str) -> int:
        """Bytes of all parameters on a device of that type; a packed tied head is a copy."""
        targets = [part.target for slot in self.slots().values() for part in slot.parts]
        copied = self.head.tied and self.head.ops.has_blocked_layout(device_type, targets[0].dtype)
        return sum(target.nbytes for target in targets) + copied * self.head.weight.nbytes

    def run_layers(
        self, residual: torch.Tensor, step: Step, backend: AttentionBackend
    ) -> torch.Tensor:
        """Embedded tokens [T, hidden] become, in place, the hidden states before the last norm."""
        rotation = Rotation(*self.rotary(step.positions))
        x = self.layers[0].input_norm(residual)
        for index, layer in enumerate(self.layers):
            if index:
                x = layer.input_norm.after_add(x, residual)
            x = layer.attention(x, rotation, backend, step)
            x = layer.mlp(layer.post_norm.after_add(x, residual), step.lora)
        return residual.add_(x)

    def logits(self, hidden: torch.Tensor, lora: Any) -> torch.Tensor:
        """Logits [N, vocab] of hidden states [N, hidden]; `lora` as for linear layers."""
        return self.head(self.norm(hidden), lora)


class DecoderModel:
    """A decoder with its weights loaded, and the receipt for them."""

    def __init__(
        self,
        cfg: ModelConfig,
        checkpoint: Checkpoint,
        device: Device,
        topology: Topology,
        ops: OpSet,
        ledger: MemoryLedger,
    ) -> None:
        """Count on `meta`, reserve, allocate, load. Raises ConfigError, CapacityError,
        ModelError.
        """
        self.spec = checkpoint.spec
        self.name = checkpoint.name
        self.dtype: torch.dtype = getattr(torch, cfg.dtype.value)
        self.device = device
        self.ops = ops
        self.max_model_len = cfg.max_model_len or self.spec.max_position_embeddings
        if self.max_model_len > self.spec.max_position_embeddings:
            raise ConfigError(
                f"model.max_model_len: got {self.max_model_len}, {self.name} allows at most "
                f"{self.spec.max_position_embeddings} positions"
            )
        counted = Decoder(BuildContext(torch.device("meta"), self.dtype, topology, ops), self.spec)
        num_bytes = counted.num_bytes(device.kind.value)
        self.receipt = ledger.reserve(
            "model", num_bytes, f"weights of {self.name}, {cfg.dtype.value}"
        )
        ctx = BuildContext(device.torch_device, self.dtype, topology, ops)
        self.decoder = Decoder(ctx, self.spec)
        if device.dry:
            return
        slots = self.decoder.slots()
        if checkpoint.is_dummy:
            report = fill_randomly(slots, cfg.dummy_seed)
        else:
            report = load_weights(slots, checkpoint)
        del slots
        self.decoder.pack()
        logger.info(
            "model: {} tensors, {} of {} in {:.1f} s",
            report.num_tensors,
            format_bytes(num_bytes),
            self.name,
            report.seconds,
        )

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Local kv heads, head_dim, layers."""
        return (
            self.decoder.layers[0].attention.num_kv_heads,
            self.spec.head_dim,
            self.spec.num_layers,
        )

    @property
    def num_heads(self) -> int:
        """Local query heads."""
        return self.decoder.layers[0].attention.num_heads

    def linears(self) -> Iterator[Linear]:
        """The linear layers of the decoder's layers, in their order; the head is apart."""
        for layer in self.decoder.layers:
            yield from layer.linears()

    @property
    def embedding(self) -> Embedding:
        return self.decoder.embedding

    @property
    def head(self) -> OutputHead:
        return self.decoder.head

    def forward(self, step: Step, backend: AttentionBackend) -> torch.Tensor:
        """Hidden states [T, hidden] of the step's tokens."""
        embedded = self.embedding(step.token_ids, step.embedding_lora)
        return self.run_layers(embedded, step, backend)

    def run_layers(
        self, embedded: torch.Tensor, step: Step, backend: AttentionBackend
    ) -> torch.Tensor:
        """Embedded tokens [T, hidden] become, in place, hidden states; they are returned."""
        return self.decoder.run_layers(embedded, step, backend)

    def logits(self, hidden: torch.Tensor, lora: Any) -> torch.Tensor:
        """Logits [N, vocab] of rows of hidden states [N, hidden], with the adapters bound for the
        head in `lora` (None: base only).
        """
        return self.decoder.logits(hidden, lora)
