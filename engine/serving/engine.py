"""The engine: prompts in, token events out, one `step` at a time. The in-process API of offline
use.

Ties tokenizer, scheduler, runner and sampler together; each of them owns its part. Not thread-safe:
`engine.serving.async_engine` runs it on a thread of its own.
"""

import dataclasses
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
from engine.lora.manager import LoRAManager, ReadAdapter
from engine.lora.ref import FROM_TENSORS, LoRARef, LoRAUpdateOutput
from engine.memory.audit import MemoryAudit
from engine.memory.kv_pool import KVPool
from engine.models.decoder import DecoderModel
from engine.runtime.logits import LogitsState
from engine.runtime.request import FinishReason, Request, ScheduledRow
from engine.runtime.runner import ModelRunner
from engine.runtime.sampler import Sampler, TokenLogprobs
from engine.runtime.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.serving.flight import Flight, Outcome
from engine.serving.group import RequestGroup, Sample, sample_seed
from engine.serving.inputs import (
    AdapterChoice,
    Prompt,
    adapter_uses,
    as_prompts,
    check_params,
    check_priority,
    per_prompt,
    prompt_ids,
)
from engine.serving.output import Completion, TextStream, TokenEvent
from engine.serving.throughput import Throughput
from engine.text.grammar import Grammars
from engine.text.tokenizer import Tokenizer


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
        self._end_ids = tokenizer.eos_token_ids | frozenset(model.spec.eos_token_ids)
        self.components: dict[str, object] = {}  # the user's own by name, set by the wiring
        self.grammars = Grammars(tokenizer, self._end_ids, model.spec.vocab_size)
        self._ids = itertools.count()
        self._next_flight: Flight | None = None
        self._groups: dict[int, RequestGroup] = {}
        self._samples: dict[int, Sample] = {}
        self._seeds = random.SystemRandom()

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        adapter: AdapterChoice | None = None,
        *,
        priority: int = 0,
    ) -> int:
        """Queue a prompt (text, or token ids) and return its request id, one for all its samples.
        `adapter` is a name, or names with weights.

        Raises RequestError, AdapterError; then nothing is queued.
        """
        params = sampling if sampling is not None else self.sampling_params()
        check_priority(priority)
        check_params(params, self.tokenizer, self.model)
        ids = prompt_ids(prompt, params, self.tokenizer, self.model)
        uses = adapter_uses(adapter, self.lora_manager)
        bad_words = [own for word in params.bad_words for own in self.tokenizer.spellings(word)]
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        kept = dict(adapter) if isinstance(adapter, Mapping) else adapter
        group = RequestGroup(next(self._ids), kept)
        try:
            for index in range(params.n):
                own = params if index == 0 else dataclasses.replace(params, prompt_logprobs=None)
                request = Request(
                    group.group_id if index == 0 else next(self._ids),
                    ids,
                    own,
                    sample_seed(seed, index),
                    uses,
                    priority=priority,
                    use_prefix_cache=own.prompt_logprobs is None,
                    leader=group.samples[0].request if group.samples else None,
                )
                state = self._logits_state(request, tuple(bad_words))
                self.scheduler.submit(request)
                sample = Sample(group, request, state, TextStream(request, self.tokenizer))
                group.samples.append(sample)
        except BaseException:
            for sample in group.samples:
                self.scheduler.finish(sample.request, FinishReason.abort)
            raise
        self._groups[group.group_id] = group
        self._samples.update((sample.request.request_id, sample) for sample in group.samples)
        return group.group_id

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """The configured defaults with `overrides`. Raises RequestError on unknown or bad
        values.
        """
        return SamplingParams.from_config(self.cfg, **overrides)

    def abort(self, request_id: int) -> None:
        """End a request early, with all its samples; pages, slot and place are free at once.
        Unknown or ended ids are ignored.
        """
        group = self._groups.get(request_id)
        for sample in group.open_samples if group is not None else ():
            self._end(sample, FinishReason.abort)

    def fail_all(self, error: str) -> list[TokenEvent]:
        """End all open requests with an error, for faults of the engine itself."""
        return [self._fail(sample, error) for sample in list(self._samples.values())]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Take one step's tokens, with the next one under way where decode graphs allow it. A
        failing step ends its own requests with reason "error"; the engine goes on.
        """
        started = time.perf_counter()
        flight, self._next_flight = self._next_flight, None
        rows = self.scheduler.schedule() if flight is None else flight.rows
        if not rows:
            return []
        samples = [self._samples.get(row.request.request_id) for row in rows]
        try:
            flight = flight or self._take_off(rows)
            self._next_flight = self._follow(flight)
            outcomes = flight.land()
        except Exception as error:
            logger.exception("step of {} rows failed", len(rows))
            self._next_flight = None
            return [self._fail(sample, str(error)) for sample in samples if sample is not None]
        num_tokens = sum(row.num_new for row in rows)
        prefill = any(row.num_new > 1 for row in rows)
        self.throughput.add(num_tokens, time.perf_counter() - started, prefill=prefill)
        events = [
            self._take(row, sample, outcome)
            for row, sample, outcome in zip(rows, samples, outcomes, strict=True)
            if sample is not None  # else it has ended while the step was under way
        ]
        return [event for event in events if event is not None]

    # ------------------------------------------------------------------ offline use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
    ) -> list[Completion]:
        """Run prompts to their end in mixed batches; one value for all or one per prompt, in order.
        A prompt's samples follow each other.

        Either all prompts are queued or none: a refused one raises before anything runs.
        """
        many = as_prompts(prompts)
        params = per_prompt(sampling, len(many), "sampling")
        adapters = per_prompt(adapter, len(many), "adapter")
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
        """Step until the given requests have ended; their completions in that order, all samples of
        each. Raises RequestError on an id that is not open.

        `on_step` sees each step's events, those of other requests included.
        """
        wanted = list(request_ids)
        unknown = [request_id for request_id in wanted if request_id not in self._groups]
        if unknown:
            raise RequestError(
                f"requests {unknown[:3]} are not open; they have ended or never were"
            )
        groups = [self._groups[request_id] for request_id in wanted]
        try:
            while any(group.open_samples for group in groups):
                on_step(self.step())
        except BaseException:
            for request_id in wanted:
                self.abort(request_id)
            raise
        return [completion for group in groups for completion in group.completions()]

    # ------------------------------------------------------------------ adapters

    def read_adapter(self, name: str, path: str | Path) -> ReadAdapter:
        """Read and check a PEFT directory for a load to come; any thread may do so while others
        decode. Raises AdapterError.
        """
        return self.lora_manager.read_lora_adapter(LoRARef(name, str(path)))

    def read_adapter_from_tensors(
        self, name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> ReadAdapter:
        """The same for PEFT tensors and config from memory."""
        ref = LoRARef(name, FROM_TENSORS)
        return self.lora_manager.read_lora_adapter_from_tensors(ref, tensors, config)

    def load_adapter(
        self,
        name: str,
        path: str | Path,
        *,
        pinned: bool = False,
        replace: bool = False,
        read: ReadAdapter | None = None,
    ) -> LoRARef:
        """Load a PEFT directory under `name`; with `replace` in the place of one that has it.
        `read`: what `read_adapter` gave. Raises AdapterError with all reasons.
        """
        ref = LoRARef(name, str(path), pinned)
        return _loaded(ref, self.lora_manager.load_lora_adapter(ref, replace=replace, read=read))

    def load_adapter_from_tensors(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        *,
        replace: bool = False,
    ) -> LoRARef:
        """Load PEFT tensors and config from memory under `name`. Raises AdapterError."""
        ref = LoRARef(name, FROM_TENSORS)
        load = self.lora_manager.load_lora_adapter_from_tensors
        return _loaded(ref, load(ref, tensors, config, replace=replace))

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

    def _logits_state(
        self, request: Request, bad_words: tuple[tuple[int, ...], ...]
    ) -> LogitsState:
        structure = request.params.structure
        matcher = None if structure is None else self.grammars.matcher(*structure)
        vocab_size = self.model.spec.vocab_size
        return LogitsState(request, self._end_ids, matcher, bad_words, vocab_size)

    @torch.inference_mode()
    def _take_off(self, rows: Sequence[ScheduledRow]) -> Flight:
        """One forward pass and, for rows that sample, one draw."""
        samples = [self._samples[row.request.request_id] for row in rows]
        return Flight(self.runner.run(rows), rows, samples, self.sampler)

    @torch.inference_mode()
    def _follow(self, flight: Flight) -> Flight | None:
        """The step after `flight` with the same rows, begun before its tokens are known; None where
        these must be known first.
        """
        token_ids = flight.token_ids
        if token_ids is None or not self.scheduler.extend(flight.rows):
            return None
        run = self.runner.run_ahead(flight.rows, token_ids)
        if run is None:
            return None
        return Flight(run, flight.rows, flight.samples, self.sampler, follows=True)

    def _take(self, row: ScheduledRow, sample: Sample, outcome: Outcome) -> TokenEvent | None:
        """Book what a step gave a row; an event if there is a new token or the row is faulty."""
        if outcome.fault:
            return self._fail(sample, outcome.fault)
        sample.group.add_prompt_logprobs(row.request.num_computed, outcome.prompt_logprobs)
        self.scheduler.advance(row, outcome.token_id)
        if outcome.token_id is None:
            return None
        return self._emit(sample, outcome.token_id, outcome.logprobs)

    def _emit(self, sample: Sample, token_id: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        request, reason = sample.request, None
        is_end = self._is_end(request, token_id)
        if is_end or sample.grammar_ended:
            reason = FinishReason.stop
        elif len(request.output_ids) >= request.params.max_tokens:
            reason = FinishReason.length
        event = sample.push(token_id, logprobs, reason, silent=is_end)
        if event.finish_reason is not None:
            self._end(sample, event.finish_reason)
        return event

    def _is_end(self, request: Request, token_id: int) -> bool:
        if token_id in request.params.stop_token_ids:
            return True
        return token_id in self._end_ids and not request.params.ignore_eos

    def _fail(self, sample: Sample, error: str) -> TokenEvent:
        event = sample.fail(error)
        self._end(sample, FinishReason.error)
        return event

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        self.scheduler.finish(sample.request, reason)
        del self._samples[sample.request.request_id]
        if not sample.group.open_samples:
            del self._groups[sample.group.group_id]


def _loaded(ref: LoRARef, output: LoRAUpdateOutput) -> LoRARef:
    if not output.success:
        raise AdapterError(output.error_message)
    return ref
