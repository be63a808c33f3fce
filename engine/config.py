"""The typed configuration: one slotted dataclass per group of `conf/`, ranges checked when it is
built.

Knows nothing of torch, so that `--help` and `--cfg job` answer at once. YAML holds the values, the
dataclasses hold types, defaults and ranges; `_target_` names the class of a component that may be
replaced by one's own.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from engine.errors import ConfigError


class LoadFormat(Enum):
    auto = "auto"
    safetensors = "safetensors"
    gguf = "gguf"
    dummy = "dummy"


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class DeviceKind(Enum):
    cpu = "cpu"
    cuda = "cuda"


class EvictionPolicy(Enum):
    lru = "lru"
    fifo = "fifo"


class GraphMode(Enum):
    off = "off"
    decode = "decode"


class KernelSet(Enum):
    reference = "reference"
    triton = "triton"


class CommandName(Enum):
    generate = "generate"
    plan = "plan"
    wiring = "wiring"
    bench = "bench"
    serve = "serve"


class LogLevel(Enum):
    trace = "trace"
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def _check(key: str, value: Any, ok: bool, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{key}: got {value!r}, allowed is {allowed}")


def _at_least(key: str, value: float | None, low: float) -> None:
    _check(key, value, value is None or value >= low, f"a number >= {low}")


def _above(key: str, value: float | None, low: float) -> None:
    _check(key, value, value is None or value > low, f"a number above {low}")


def _within(key: str, value: float, low: float, high: float) -> None:
    _check(key, value, low <= value <= high, f"a number from {low} to {high}")


def _not_blank(key: str, value: str | None) -> None:
    _check(key, value, value is None or bool(value.strip()), "a text that is not empty")


@dataclass(slots=True)
class ModelConfig:
    """`path`: "default", a Hugging Face directory, a .gguf file, or "hub:owner/name"."""

    _target_: str = "engine.models.decoder.DecoderModel"
    path: str = "default"
    load_format: LoadFormat = LoadFormat.auto
    dtype: DType = DType.float32
    max_model_len: int | None = None
    revision: str | None = None
    cache_dir: str | None = None
    dummy_seed: int = 0

    def __post_init__(self) -> None:
        _check(
            "model.path",
            self.path,
            bool(self.path.strip()),
            "a path, 'default' or 'hub:owner/name'",
        )
        _at_least("model.max_model_len", self.max_model_len, 1)


@dataclass(slots=True)
class DeviceConfig:
    """Where tensors live. `memory_bytes` replaces what the device reports, `dry` builds shapes
    only.
    """

    kind: DeviceKind = DeviceKind.cpu
    index: int = 0
    num_threads: int | None = None
    memory_bytes: int | None = None
    dry: bool = False

    def __post_init__(self) -> None:
        _at_least("device.index", self.index, 0)
        _at_least("device.num_threads", self.num_threads, 1)
        _at_least("device.memory_bytes", self.memory_bytes, 1)


@dataclass(slots=True)
class LoRAConfig:
    """Adapters. `adapters` maps names to directories ("demo:NAME" is one that ships with the
    engine). `saved_modules`: whole embeddings or heads (modules_to_save) that may be resident. An
    expert row holds one rank of one expert in each layer.
    `resolve`: the server looks for adapters that it does not know in `server.adapter_roots`.
    """

    _target_: str = "engine.lora.manager.LoRAManager"
    max_loras_per_batch: int = 8
    max_lora_rank: int = 64
    pool_rank_rows: int | None = None
    pool_expert_rows: int | None = None
    saved_modules: int | None = None
    eviction: EvictionPolicy = EvictionPolicy.lru
    adapters: dict[str, str] = field(default_factory=dict)
    pinned: list[str] = field(default_factory=list)
    resolve: bool = False

    def __post_init__(self) -> None:
        _within("lora.max_loras_per_batch", self.max_loras_per_batch, 0, 4096)
        _within("lora.max_lora_rank", self.max_lora_rank, 1, 4096)
        _check(
            "lora.pool_rank_rows",
            self.pool_rank_rows,
            self.pool_rank_rows is None or self.pool_rank_rows >= self.max_lora_rank,
            f"null or a number >= lora.max_lora_rank ({self.max_lora_rank})",
        )
        _at_least("lora.pool_expert_rows", self.pool_expert_rows, 0)
        _at_least("lora.saved_modules", self.saved_modules, 0)
        unknown = [name for name in self.pinned if name not in self.adapters]
        _check(
            "lora.pinned",
            unknown,
            not unknown,
            f"names in lora.adapters ({', '.join(self.adapters)})",
        )


@dataclass(slots=True)
class MemoryConfig:
    """The budget of the memory plan, the shape of KV pages, and whether full ones are kept for
    requests that begin alike.
    """

    fraction: float = 0.5
    page_size: int = 16
    max_kv_tokens: int | None = None
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        _check(
            "memory.fraction",
            self.fraction,
            0.0 < self.fraction <= 1.0,
            "a number above 0 and at most 1",
        )
        _within("memory.page_size", self.page_size, 1, 1024)
        _at_least("memory.max_kv_tokens", self.max_kv_tokens, 1)


@dataclass(slots=True)
class GraphConfig:
    """Decode graphs: `batch_sizes` that steps are padded to; larger steps run eagerly."""

    mode: GraphMode = GraphMode.off
    batch_sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            _within("graph.batch_sizes", size, 1, 1024)
        wanted = self.mode is GraphMode.off or bool(self.batch_sizes)
        _check("graph.batch_sizes", self.batch_sizes, wanted, "at least one with graph.mode=decode")

    def captured_sizes(self, max_rows: int) -> tuple[int, ...]:
        """The sizes to capture, ascending, none larger than the largest batch; none if off."""
        if self.mode is GraphMode.off:
            return ()
        return tuple(sorted({min(size, max_rows) for size in self.batch_sizes}))


@dataclass(slots=True)
class KernelsConfig:
    """Which implementation of `kernels/` runs; attention is chosen apart from the rest."""

    ops: KernelSet = KernelSet.reference
    attention: KernelSet = KernelSet.reference


@dataclass(slots=True)
class SchedulerConfig:
    """Continuous batching. `max_step_tokens` bounds the tokens of one forward, prompts are cut to
    fit it. Whoever is first in line and waits for a slot is passed over at most `max_skips` times
    and for `drain_after_s` seconds; for so long may others go ahead of the oldest, too.
    """

    _target_: str = "engine.scheduling.scheduler.Scheduler"
    max_running_requests: int = 64
    max_step_tokens: int = 512
    max_skips: int = 64
    drain_after_s: float | None = 10.0

    def __post_init__(self) -> None:
        _within("scheduler.max_running_requests", self.max_running_requests, 1, 65536)
        _check(
            "scheduler.max_step_tokens",
            self.max_step_tokens,
            self.max_step_tokens >= self.max_running_requests,
            f"a number >= scheduler.max_running_requests ({self.max_running_requests})",
        )
        _at_least("scheduler.max_skips", self.max_skips, 0)
        _at_least("scheduler.drain_after_s", self.drain_after_s, 0)


@dataclass(slots=True)
class SamplingConfig:
    """Defaults of a request's sampling parameters; temperature 0 is greedy, top_k 0, min_p 0 and
    repetition_penalty 1 are off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    max_tokens: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        _at_least("sampling.temperature", self.temperature, 0.0)
        _at_least("sampling.top_k", self.top_k, 0)
        _check(
            "sampling.top_p", self.top_p, 0.0 < self.top_p <= 1.0, "a number above 0 and at most 1"
        )
        _within("sampling.min_p", self.min_p, 0.0, 1.0)
        _check(
            "sampling.repetition_penalty",
            self.repetition_penalty,
            0.0 < self.repetition_penalty < float("inf"),
            "a finite number above 0",
        )
        _within("sampling.presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("sampling.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _at_least("sampling.max_tokens", self.max_tokens, 1)
        _within("sampling.min_tokens", self.min_tokens, 0, self.max_tokens)


@dataclass(slots=True)
class CommandConfig:
    """What `python -m engine` does. `prompts` are user messages; `batch_sizes` and lengths are
    bench's.
    """

    name: CommandName = CommandName.generate
    prompts: list[str] = field(default_factory=list)
    chat: bool = True
    progress: bool = True
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32])
    prompt_tokens: int = 64
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            _at_least("command.batch_sizes", size, 1)
        _at_least("command.prompt_tokens", self.prompt_tokens, 1)
        _at_least("command.new_tokens", self.new_tokens, 1)


@dataclass(slots=True)
class ServerConfig:
    """`command=serve`: where it listens, who may call, how much is taken, and what happens when
    the engine process dies. Limits that are None are off.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys_file: str | None = None
    admin_keys_file: str | None = None
    adapter_roots: list[str] = field(default_factory=list)
    max_body_bytes: int = 4 << 20
    max_adapter_body_bytes: int = 1 << 30
    max_prompt_tokens: int | None = None
    max_n: int = 16
    max_requests: int = 1024
    request_timeout_s: float | None = 600.0
    max_stream_events: int = 1024
    drain_timeout_s: float = 30.0
    max_restarts: int = 3
    restart_window_s: float = 600.0
    access_log: bool = False
    json_log: bool = False
    otel_endpoint: str | None = None
    page: bool = True
    max_adapter_labels: int = 64

    def __post_init__(self) -> None:
        for name in ("host", "served_model_name", "api_keys_file", "admin_keys_file"):
            _not_blank(f"server.{name}", getattr(self, name))
        for root in self.adapter_roots:
            _not_blank("server.adapter_roots", root)
        _not_blank("server.otel_endpoint", self.otel_endpoint)
        _within("server.port", self.port, 0, 65535)
        _within("server.max_body_bytes", self.max_body_bytes, 1, 1 << 30)
        _within("server.max_adapter_body_bytes", self.max_adapter_body_bytes, 1, 2 << 30)
        _at_least("server.max_prompt_tokens", self.max_prompt_tokens, 1)
        _within("server.max_n", self.max_n, 1, 128)
        _at_least("server.max_requests", self.max_requests, 1)
        _above("server.request_timeout_s", self.request_timeout_s, 0)
        _at_least("server.max_stream_events", self.max_stream_events, 1)
        _at_least("server.drain_timeout_s", self.drain_timeout_s, 0)
        _at_least("server.max_restarts", self.max_restarts, 0)
        _above("server.restart_window_s", self.restart_window_s, 0)
        _at_least("server.max_adapter_labels", self.max_adapter_labels, 0)


@dataclass(slots=True)
class EngineConfig:
    """Root of the tree. `components` holds classes of one's own (`name: {_target_: pkg.Class, key:
    value}`).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    command: CommandConfig = field(default_factory=CommandConfig)
    components: dict[str, Any] = field(default_factory=dict)
    log_level: LogLevel = LogLevel.info
