"""The engine: prompts in, token events out, one `step` at a time. The in-process API of offline
use.

Ties tokenizer, scheduler, runner and sampler together; each of them owns its part. Not thread-safe:
`engine.serving.async_engine` runs it on a thread of its own.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from engine.config import SamplingConfig
from engine.errors import AdapterError, EngineError, RequestError
from engine.lora.manager import LoRAManager
from engine.lora.ref import LoRARef, LoRAUpdateOutput, LoRAUse
from engine.memory.audit import MemoryAudit
from engine.memory.kv_pool import KVPool
from engine.models.decoder import DecoderModel
from engine.runtime.request import FinishReason, Request, ScheduledRow
from engine.runtime.runner import ModelRunner
from engine.runtime.sampler import Sampler, SamplingRow
from engine.runtime.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.serving.output import Completion, OutputStream, TokenEvent
from engine.serving.throughput import Throughput
from engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Engine:
    """One base model, many adapters, continuous batching."""

    def __init__(
        self,
        cfg: SamplingConfig,
        tokenizer: Tokenizer,
        model: DecoderModel,
        kv_pool: KVPool,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        lora_manager: LoRAManager,
        audit: MemoryAudit,
    ) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.model = model
        self.kv_pool = kv_pool
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.lora_manager = lora_manager
        self.audit = audit
        self.throughput = Throughput()
        self.components: dict[str, object] = {}  # the user's own by name, set by the wiring
        self._stop_ids = tokenizer.eos_token_ids | frozenset(model.spec.eos_token_ids)
        self._ids = itertools.count()
        self._streams: dict[int, OutputStream] = {}
        self._seeds = random.SystemRandom()

    # ------------------------------------------------------------------ requests

    def add_request(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str | None = None
    ) -> int:
        """Queue a prompt (text, or token ids) and return its request id. Raises RequestError,
        AdapterError.
        """
        params = sampling if sampling is not None else self.sampling_params()
        prompt_ids = self._prompt_ids(prompt, params)
        adapters = () if adapter is None else (LoRAUse(self.lora_manager.resolve(adapter).lora_id),)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        request = Request(next(self._ids), prompt_ids, params, seed, adapters)
        self.scheduler.submit(request)
        self._streams[request.request_id] = OutputStream(request, adapter, self.tokenizer)
        return request.request_id

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """The configured defaults with `overrides`. Raises RequestError on unknown or bad
        values.
        """
        return SamplingParams.from_config(self.cfg, **overrides)

    def abort(self, request_id: int) -> None:
        """End a request early; its pages, slot and place are free at once. Unknown or ended ids are
        ignored.
        """
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.scheduler.finish(stream.request, FinishReason.abort)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Compute one step. A failing step ends its own requests with reason "error"; the engine
        goes on.
        """
        rows = self.runner.order(self.scheduler.schedule())
        if not rows:
            return []
        started = time.perf_counter()
        try:
            token_ids, logprobs = self._forward(rows)
        except Exception as error:
            logger.exception("step of {} rows failed", len(rows))
            return [self._fail(row.request, error) for row in rows]
        num_tokens = sum(row.num_new for row in rows)
        prefill = any(row.num_new > 1 for row in rows)
        self.throughput.add(num_tokens, time.perf_counter() - started, prefill=prefill)
        events: list[TokenEvent] = []
        sampled = iter(zip(token_ids, logprobs, strict=True))
        for row in rows:
            if not row.samples:
                self.scheduler.advance(row, None)
                continue
            token_id, row_logprobs = next(sampled)
            self.scheduler.advance(row, token_id)
            events.append(self._emit(row.request, token_id, row_logprobs))
        return events

    # ------------------------------------------------------------------ offline use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Run prompts to their end in mixed batches; one value for all or one per prompt, in order.

        Either all prompts are queued or none: a refused one raises before anything runs.
        """
        many = _as_list(prompts)
        params = _per_prompt(sampling, len(many), "sampling")
        adapters = _per_prompt(adapter, len(many), "adapter")
        ids: list[int] = []
        try:
            for prompt, one, name in zip(many, params, adapters, strict=True):
                ids.append(self.add_request(prompt, one, name))
        except EngineError:
            for request_id in ids:
                self.abort(request_id)
            raise
        return self.run_to_end(ids)

    def run_to_end(
        self,
        request_ids: Iterable[int],
        on_step: Callable[[list[TokenEvent]], object] = lambda events: None,
    ) -> list[Completion]:
        """Step until the given requests have ended; their completions in that order.

        `on_step` sees each step's events, those of other requests included.
        """
        wanted = list(request_ids)
        streams = {request_id: self._streams[request_id] for request_id in wanted}
        try:
            while any(stream.request.finish_reason is None for stream in streams.values()):
                on_step(self.step())
        except BaseException:
            for request_id in wanted:
                self.abort(request_id)
            raise
        return [streams[request_id].completion() for request_id in wanted]

    # ------------------------------------------------------------------ adapters

    def load_adapter(self, name: str, path: str | Path, *, pinned: bool = False) -> LoRARef:
        """Load a PEFT directory under `name`. Raises AdapterError with all reasons."""
        ref = LoRARef(name, str(path), pinned)
        return _loaded(ref, self.lora_manager.load_lora_adapter(ref))

    def load_adapter_from_tensors(
        self, name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> LoRARef:
        """Load PEFT tensors and config from memory under `name`. Raises AdapterError."""
        ref = LoRARef(name, "tensors")
        return _loaded(ref, self.lora_manager.load_lora_adapter_from_tensors(ref, tensors, config))

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for `name`; running ones finish. Raises AdapterError if it is not
        loaded.
        """
        ref = self.lora_manager.resolve(name)
        _loaded(ref, self.lora_manager.unload_lora_adapter(ref))

    def list_adapters(self) -> tuple[LoRARef, ...]:
        """Adapters that requests may name."""
        return self.lora_manager.list_adapters()

    # ------------------------------------------------------------------ private work

    def _prompt_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if params.stop and not self.tokenizer.available:
            raise RequestError("stop: this model has no tokenizer.json; use stop_token_ids")
        if not ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        vocab_size = self.model.spec.vocab_size
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise RequestError(
                f"token ids {outside[:3]} are outside the vocabulary of 0 to {vocab_size - 1}"
            )
        limit = self.model.max_model_len
        if len(ids) + params.max_tokens > limit:
            raise RequestError(
                f"{len(ids)} prompt tokens + max_tokens {params.max_tokens} exceed the model's "
                f"{limit} positions by {len(ids) + params.max_tokens - limit}; shorten the prompt "
                "or lower max_tokens"
            )
        return ids

    @torch.inference_mode()
    def _forward(self, rows: Sequence[ScheduledRow]) -> tuple[list[int], list[Any]]:
        logits = self.runner.run(rows).logits
        sampling = [
            SamplingRow(row.request.params, row.request.seed, row.request.num_tokens)
            for row in rows
            if row.samples
        ]
        if not sampling:
            return [], []
        output = self.sampler.sample(logits, sampling)
        return output.token_ids.tolist(), list(output.logprobs)

    def _emit(self, request: Request, token_id: int, logprobs: Any) -> TokenEvent:
        stream = self._streams[request.request_id]
        reason = None
        if self._stops(request, token_id):
            reason = FinishReason.stop
        elif len(request.output_ids) >= request.params.max_tokens:
            reason = FinishReason.length
        event = stream.push(token_id, logprobs, reason)
        if event.finish_reason is not None:
            self._end(request, event.finish_reason)
        return event

    def _stops(self, request: Request, token_id: int) -> bool:
        if token_id in request.params.stop_token_ids:
            return True
        return token_id in self._stop_ids and not request.params.ignore_eos

    def _fail(self, request: Request, error: Exception) -> TokenEvent:
        event = self._streams[request.request_id].fail(str(error))
        self._end(request, FinishReason.error)
        return event

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        del self._streams[request.request_id]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text or token ids) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    if len(ids) == len(prompts) and ids:
        return [ids]
    if ids:
        raise RequestError("prompts: token ids and whole prompts are mixed; give one kind")
    return [item for item in prompts if not isinstance(item, int)]


def _per_prompt(value: Any, count: int, what: str) -> list[Any]:
    if value is None or isinstance(value, str | SamplingParams):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise RequestError(f"{what}: {len(values)} values were given for {count} prompts")
    return values


def _loaded(ref: LoRARef, output: LoRAUpdateOutput) -> LoRARef:
    if not output.success:
        raise AdapterError(output.error_message)
    return ref
