"""The memory of captured decode graphs, measured before the KV pool is sized: some are captured
against a KV pool of a page, and thrown away.
"""

import torch

from engine.config import KernelSet, MemoryConfig
from engine.device import Device
from engine.memory.ledger import MemoryLedger
from engine.models.decoder import DecoderModel
from engine.runtime.attention_space import AttentionSpace
from engine.runtime.decode_space import DecodeSpace
from engine.runtime.graph_capture import GraphCapturer, capture_layers
from engine.runtime.probe_pool import ProbePool

# A captured layer, and numbers that live at once for each row and width of the widest linear; used
# where nothing can be captured.
_LAYER_BYTES = 64 << 10
_LIVE_NUMBERS = 2


class GraphProbe:
    """Holds the receipt of all graphs' memory."""

    def __init__(
        self,
        paging: MemoryConfig,
        space: DecodeSpace,
        attention_space: AttentionSpace,
        model: DecoderModel,
        device: Device,
        ledger: MemoryLedger,
    ) -> None:
        """Measure and reserve. Raises CapacityError."""
        num_graphs = len(space.batch_sizes) * (1 + (space.lora is not None))
        if not num_graphs:
            self.receipt = ledger.reserve("decode_graphs", 0, "decode graphs are off")
            return
        if device.dry or device.host_visible:
            num_bytes, how = estimated_bytes(space, model, num_graphs), "estimated"
        else:
            num_bytes = _measured_bytes(paging, space, attention_space, model, device, num_graphs)
            how = "measured"
        what = f"{num_graphs} captured graphs, {how}"
        self.receipt = ledger.reserve("decode_graphs", num_bytes, what, transient=True)


def estimated_bytes(space: DecodeSpace, model: DecoderModel, num_graphs: int) -> int:
    """By the layers' shapes: one pool for the largest batch, and what each graph holds of its
    own.
    """
    widest = max(linear.in_features + sum(linear.widths) for linear in model.linears())
    pool = _LIVE_NUMBERS * space.batch_sizes[-1] * widest * model.dtype.itemsize
    return pool + num_graphs * model.spec.num_layers * _LAYER_BYTES


def _measured_bytes(
    paging: MemoryConfig,
    space: DecodeSpace,
    attention_space: AttentionSpace,
    model: DecoderModel,
    device: Device,
    num_graphs: int,
) -> int:
    """What the largest graph takes, and for each other one what a second takes."""
    from engine.runtime.triton_attention import TritonAttention

    pool = ProbePool(1, paging.page_size, model, device)
    name, workspace = KernelSet.triton.value, attention_space.decode
    attention = TritonAttention(name, pool, model, workspace, device.torch_device)
    capturer = GraphCapturer(device)
    lora = None if space.lora is None else space.lora.work
    free, graphs = [device.available_bytes()], []
    for size in (space.batch_sizes[-1], space.batch_sizes[0]):
        graphs.append(capture_layers(capturer, model, attention, space.inputs, size, lora))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(device.available_bytes())
    del graphs
    torch.cuda.empty_cache()
    return free[0] - free[1] + (num_graphs - 1) * max(0, free[1] - free[2])
