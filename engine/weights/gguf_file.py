"""Reads a GGUF file through the `gguf` library: its config as a Hugging Face one, its tensors.

llama.cpp permutes the rows of q and k for its own rotary layout (architecture llama only); that is
undone here. Knows nothing of layers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.errors import ModelError

# GGUF architecture -> Hugging Face model_type.
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}
PERMUTED = ("llama",)
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """One open file; `fields` are its metadata as plain values."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is missing, no GGUF file, or of an unknown architecture."""
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelError(f"{path}: cannot be read as GGUF ({error}); fetch it again") from error
        self.architecture = str(self.field("general.architecture", ""))
        if self.architecture not in MODEL_TYPES:
            raise ModelError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; supported are "
                f"{', '.join(MODEL_TYPES)}"
            )

    def field(self, key: str, default: Any = None) -> Any:
        """One metadata value; lists come as lists."""
        found = self._reader.fields.get(key)
        return default if found is None else found.contents()

    def config(self) -> dict[str, Any]:
        """The metadata as a Hugging Face config. Raises ModelError for what has no counterpart."""
        own = self.architecture
        tensors = {tensor.name for tensor in self._reader.tensors}
        if ROPE_FACTORS in tensors:
            raise ModelError(
                f"{self.path}: rope factors stored as a tensor ({ROPE_FACTORS}) are not supported; "
                "use the model's Hugging Face directory"
            )
        scaling = self.field(f"{own}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelError(
                f"{self.path}: rope scaling {scaling!r} is not supported in GGUF files"
            )
        hidden = self._number("embedding_length")
        heads = self._number("attention.head_count")
        head_dim = self.field(f"{own}.attention.key_length", hidden // heads)
        rope: dict[str, Any] = {
            "rope_type": "linear" if scaling == "linear" else "default",
            "rope_theta": float(self.field(f"{own}.rope.freq_base", 10000.0)),
            "partial_rotary_factor": self.field(f"{own}.rope.dimension_count", head_dim) / head_dim,
        }
        if scaling == "linear":
            rope["factor"] = float(self.field(f"{own}.rope.scaling.factor", 1.0))
        embedding = next(t for t in self._reader.tensors if t.name == "token_embd.weight")
        eps = float(self.field(f"{own}.attention.layer_norm_rms_epsilon", 1e-6))
        return {
            "model_type": MODEL_TYPES[own],
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.field(f"{own}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": float(np.format_float_positional(np.float32(eps))),
            "rope_parameters": rope,
            "sliding_window": self.field(f"{own}.attention.sliding_window"),
            "max_position_embeddings": self._number("context_length"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": own == "llama" and "blk.0.attn_q.bias" in tensors,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, float32 tensor), dequantized one by one."""
        heads = self._number("attention.head_count")
        kv_heads = self.field(f"{self.architecture}.attention.head_count_kv", heads)
        for stored in self._reader.tensors:
            shape = [int(size) for size in stored.shape[::-1]]
            values = np.array(gguf.dequantize(stored.data, stored.tensor_type), np.float32)
            tensor = torch.from_numpy(values).reshape(shape)
            kind = stored.name.split(".")[-2]
            if self.architecture in PERMUTED and kind in ("attn_q", "attn_k"):
                tensor = unpermute(tensor, heads if kind == "attn_q" else kv_heads)
            yield from self._named(stored.name, tensor)

    def _named(self, stored: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        *block, kind, suffix = stored.split(".")
        prefix = f"model.layers.{block[1]}." if len(block) == 2 else ""
        if self.architecture == "phi3" and kind == "ffn_up":
            yield f"{prefix}mlp.gate_up_proj.{suffix}", tensor
        else:
            yield f"{prefix}{NAMES.get(kind, kind)}.{suffix}", tensor

    def _number(self, key: str) -> int:
        value = self.field(f"{self.architecture}.{key}")
        if not isinstance(value, int):
            found = "missing" if value is None else repr(value)
            raise ModelError(f"{self.path}: metadata {self.architecture}.{key} is {found}")
        return value


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k [out, ...] from llama.cpp's order (pairs interleaved) to rotate-half."""
    rows = weight.shape[0] // num_heads // 2
    paired = weight.reshape(num_heads, rows, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape).contiguous()
