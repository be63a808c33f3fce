"""Captures the decoder's layers for a padded batch once, to be replayed. Knows nothing of how many
graphs there are or when they run.
"""

from collections.abc import Callable
from typing import Any

import torch

from engine.device import Device
from engine.layers.step import Step
from engine.models.decoder import DecoderModel
from engine.runtime.attention import StepAttention
from engine.runtime.decode_inputs import DecodeInputs

Replay = Callable[[], object]
_WARM_UPS = 2


class GraphCapturer:
    """Captures into one memory pool, so that what comes after the largest reuses its memory.

    In host memory a replay runs the work again, so that Triton's interpreter can test it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device.torch_device
        self._pool = None if device.host_visible else torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], object]) -> Replay:
        """Run `work`, which must read and write tensors at fixed addresses, then capture it."""
        if self._pool is None:
            return work
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


@torch.inference_mode()
def capture_layers(
    capturer: GraphCapturer,
    model: DecoderModel,
    attention: StepAttention,
    inputs: DecodeInputs,
    size: int,
    lora: Any,
) -> Replay:
    """The layers for `size` rows of `inputs`, with the adapters bound in `lora`; None: base only.

    A replay turns the first `size` rows of `inputs.hidden` into hidden states.
    """
    own = attention.static_step(inputs, size)
    step = Step(inputs.token_ids[:size], inputs.positions[:size], own, lora, None)
    hidden = inputs.hidden[:size]
    inputs.fill([], size)
    return capturer.capture(lambda: model.run_layers(hidden, step, attention))
