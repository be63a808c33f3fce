"""What a model is, as numbers: read from a Hugging Face config (GGUF metadata is turned into one).

Whatever this engine does not implement is refused by name. Knows nothing of tensors or files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `kind` is default, linear or llama3, which has the last three."""

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and switches of one decoder of the dense Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused_projections: bool
    sliding_window: int | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelSpec":
        """From config.json and, for the end tokens, generation_config.json. Raises ModelError."""
        architecture = config.get("model_type")
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"model_type {architecture!r} is not supported; supported are "
                f"{', '.join(ARCHITECTURES)}"
            )
        _check_activation(config)
        hidden, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        head_dim = config.get("head_dim") or hidden // num_heads
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ModelError(
                f"num_attention_heads {num_heads} does not divide by num_key_value_heads "
                f"{num_kv_heads}"
            )
        qwen2 = architecture == "qwen2"
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config, head_dim),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias and architecture in ("llama", "qwen3"),
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "llama",
            qk_norm=architecture == "qwen3",
            fused_projections=architecture == "phi3",
            sliding_window=_window(config, architecture),
            max_position_embeddings=_count(config, "max_position_embeddings"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_eos(config, generation or {}),
        )


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, expected a whole number above 0")
    return value


def _check_activation(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} is not supported; supported is silu")


def _window(config: Mapping[str, Any], architecture: str) -> int | None:
    """Sliding window in tokens for all layers; a mixture of windowed and full layers is refused."""
    window = config.get("sliding_window")
    if window is None or architecture == "llama":
        return None
    if architecture in ("qwen2", "qwen3"):
        if not config.get("use_sliding_window", False):
            return None
        raise ModelError(
            "use_sliding_window: windows on some layers only are not supported; set it to false "
            "in config.json to serve contexts up to the window"
        )
    return int(window)


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens of both files; either may hold one id or a list."""
    found: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(found))


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """From `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    parameters = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
        )
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    original = parameters.get("original_max_position_embeddings")
    if kind == "llama3":
        needed = ("factor", "low_freq_factor", "high_freq_factor")
        missing = [key for key in needed if not parameters.get(key)]
        if missing or not original:
            missing += [] if original else ["original_max_position_embeddings"]
            raise ModelError(f"rope type llama3 lacks {', '.join(missing)} in config.json")
    return RopeSpec(
        theta=theta,
        rotary_dim=int(head_dim * share),
        kind=kind,
        factor=float(parameters.get("factor") or 1.0),
        low_freq_factor=parameters.get("low_freq_factor"),
        high_freq_factor=parameters.get("high_freq_factor"),
        original_max_position=original,
    )
