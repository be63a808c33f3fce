"""A KV pool for probes: as many pages as one step needs, dropped before the real one is sized.

Knows nothing of who may own its pages.
"""

import torch

from engine.device import Device
from engine.models.decoder import DecoderModel


class ProbePool:
    """What attention needs of a KV pool of `num_pages` pages and one of padding."""

    def __init__(self, num_pages: int, page_size: int, model: DecoderModel, device: Device) -> None:
        heads, head_dim, layers = model.kv_shape
        shape = (2, num_pages + 1, heads, page_size, head_dim)
        self.num_pages = self.null_page = num_pages
        self.page_size = page_size
        self.layers: list[torch.Tensor] = [device.zeros(shape, model.dtype) for _ in range(layers)]
