"""What front end and engine process tell each other, packed with msgspec's MessagePack.

Commands go to the engine between its steps, each step sends back one `StepReport`. Keys are the
front end's own numbers. Knows neither HTTP nor the engine.
"""

from typing import Any

import msgspec


class Command(msgspec.Struct, tag=True, frozen=True):
    """Anything that the front end asks; `key` is new for each command."""

    key: int


class Submit(Command, frozen=True):
    """Queue a request. `sampling` are fields of SamplingParams that differ from the defaults;
    `adapter` a name, names with weights, or None for the base.
    """

    prompt: list[int]
    sampling: dict[str, Any]
    adapter: str | dict[str, float] | None = None
    priority: int = 0


class Abort(Command, frozen=True):
    """End the request that was submitted under `target`, or drop the data that came for it;
    unknown ones are ignored.
    """

    target: int


class LoadAdapter(Command, frozen=True):
    name: str
    path: str
    pinned: bool = False
    replace: bool = False


class AdapterData(Command, frozen=True):
    """The next piece of a safetensors file, for the LoadAdapterTensors of key `target`."""

    target: int
    data: bytes


class LoadAdapterTensors(Command, frozen=True):
    """Load from the AdapterData that came before; `config` is the contents of an
    adapter_config.json.
    """

    name: str
    config: dict[str, Any]
    replace: bool = False


class UnloadAdapter(Command, frozen=True):
    name: str


class Shutdown(Command, frozen=True):
    """Leave after the current step; open requests are given up."""


AnyCommand = (
    Submit | Abort | LoadAdapter | AdapterData | LoadAdapterTensors | UnloadAdapter | Shutdown
)


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """As `engine.runtime.sampler.TokenLogprobs`."""

    logprob: float
    top: list[tuple[int, float]]


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """One token of sample `index` of request `key`: `text` that became certain with it.

    `token_id` is None where a fault ended the sample without a token. `finish_reason` is the value
    of a FinishReason, set on a sample's last delta. `prompt_logprobs` come with the first token of
    sample 0.
    """

    key: int
    index: int
    token_id: int | None
    text: str
    finish_reason: str | None = None
    error: str = ""
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] = []


class AdapterInfo(msgspec.Struct, frozen=True):
    """A loaded adapter. `ready`: it has its place in the pool now; `num_users`: open requests."""

    name: str
    path: str
    lora_id: str
    pinned: bool
    ready: bool
    rank: int
    num_users: int


class EngineStats(msgspec.Struct, frozen=True):
    """Counts at the end of a step; totals since the engine's start. Times in seconds.

    `prompt_tokens_total` and those found cached are of samples that began to run, each once.
    Adapter loads are copies into the pool, with the seconds until they were there. Pages that are
    only kept for later requests are not used ones.
    """

    num_running: int
    num_waiting: int
    num_kv_tokens: int
    num_kv_tokens_used: int
    num_adapter_slots: int
    num_adapters_resident: int
    running_adapters: list[str]
    waiting_adapters: list[str]
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    adapter_loads_total: int
    adapter_evictions_total: int
    adapter_load_seconds_total: float
    decode_tokens_per_second: float
    prefill_tokens_per_second: float


class LedgerLine(msgspec.Struct, frozen=True):
    """One line of the memory plan."""

    owner: str
    num_bytes: int
    what: str
    transient: bool


class EngineInfo(msgspec.Struct, frozen=True):
    """What stays the same for the life of an engine process."""

    pid: int
    model: str
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    max_adapter_slots: int
    ledger: list[LedgerLine]
    kv_bytes: int
    budget_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine process has built its container."""

    info: EngineInfo
    adapters: list[AdapterInfo]
    stats: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The container could not be built; the process ends."""

    message: str


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Answer to one command. `error` is empty or the message of an error of class `kind`;
    `adapter` is a successful load's.
    """

    key: int
    kind: str = ""
    error: str = ""
    adapter: AdapterInfo | None = None


class StepReport(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Everything that one turn of the engine's loop has to tell, in one message.

    `adapters` is set when the list or a readiness changed, `stats` when a number did.
    """

    replies: list[Reply] = []
    deltas: list[TokenDelta] = []
    adapters: list[AdapterInfo] | None = None
    stats: EngineStats | None = None


AnyReport = Ready | Failed | StepReport
