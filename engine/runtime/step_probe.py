"""The largest step, run once before there is a KV pool: a whole chunk of prompt with as many
adapters as there are slots, then logits and a draw for the largest batch.
"""

import torch

from engine.config import KernelsConfig, MemoryConfig, SchedulerConfig
from engine.device import Device
from engine.layers.step import Step
from engine.lora.adapter import Part
from engine.lora.manager import LoRAManager
from engine.models.decoder import DecoderModel
from engine.runtime.attention import RowContext, open_attention
from engine.runtime.attention_space import AttentionSpace
from engine.runtime.probe_pool import ProbePool
from engine.runtime.sampler import Sampler, SamplingRow
from engine.runtime.sampling_params import SamplingParams


class StepProbe:
    """Everything that a step needs but a KV pool."""

    def __init__(
        self,
        limits: SchedulerConfig,
        paging: MemoryConfig,
        kernels: KernelsConfig,
        model: DecoderModel,
        lora_manager: LoRAManager,
        space: AttentionSpace,
        device: Device,
    ) -> None:
        self._limits = limits
        self._page_size = paging.page_size
        self._kernels = kernels
        self._model = model
        self._lora_manager = lora_manager
        self._space = space
        self._device = device

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        """The tokens that the largest step draws, int64 [rows]."""
        num_tokens = min(self._limits.max_step_tokens, self._model.max_model_len)
        pool = ProbePool(
            -(-num_tokens // self._page_size), self._page_size, self._model, self._device
        )
        self._device.forget_peak()
        return self._draw(self._hidden(pool, num_tokens))

    def measured_bytes(self) -> int:
        """Most bytes that `run` holds at once, the probe's KV pool apart. Needs an allocator."""
        self.run()
        return self._device.peak_bytes()

    def _hidden(self, pool: ProbePool, num_tokens: int) -> torch.Tensor:
        attention = open_attention(self._kernels, pool, self._model, self._device, self._space)
        device = self._device.torch_device
        step = Step(
            torch.zeros(num_tokens, dtype=torch.int64, device=device),
            torch.arange(num_tokens, device=device),
            attention.prepare([RowContext(range(pool.num_pages), 0, num_tokens)]),
            self._lora_manager.bind_full(Part.layers, num_tokens),
            None,
        )
        return self._model.forward(step, attention)

    def _draw(self, hidden: torch.Tensor) -> torch.Tensor:
        count = self._limits.max_running_requests
        rows = hidden[-1:].expand(count, -1).contiguous()
        logits = self._model.logits(rows, self._lora_manager.bind_full(Part.head, count))
        params = SamplingParams(temperature=1.0, top_p=0.9)
        sampling = [SamplingRow(params, seed=0, position=row) for row in range(count)]
        return Sampler(self._device).sample(logits, sampling).token_ids
