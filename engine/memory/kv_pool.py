"""The KV pool: device memory for keys and values, sized by the sealed memory plan.

Pages of all layers are allocated at once; who holds which page is the page allocator's business.
"""

import torch
from loguru import logger

from engine.config import MemoryConfig
from engine.device import Device
from engine.errors import CapacityError
from engine.memory.ledger import format_bytes
from engine.memory.plan import MemoryPlan
from engine.models.decoder import DecoderModel


class KVPool:
    """`layers[i]`: keys, then values, [2, num_pages + 1, kv_heads, page_size, head_dim], model
    dtype.

    Zeroed: a masked position must hold a finite number.
    """

    def __init__(
        self, cfg: MemoryConfig, plan: MemoryPlan, model: DecoderModel, device: Device
    ) -> None:
        """Take what the plan leaves, or `memory.max_kv_tokens` if that is less. CapacityError under
        one page.
        """
        heads, head_dim, layers = model.kv_shape
        self.plan = plan
        self.page_size = cfg.page_size
        self.bytes_per_token = 2 * layers * heads * head_dim * model.dtype.itemsize
        page_bytes = self.bytes_per_token * cfg.page_size
        # One page more than is handed out: what page tables are padded with.
        self.num_pages = plan.kv_bytes // page_bytes - 1
        if cfg.max_kv_tokens is not None:
            self.num_pages = min(self.num_pages, -(-cfg.max_kv_tokens // cfg.page_size))
        if self.num_pages < 1:
            raise CapacityError(
                f"kv_pool: a page of {cfg.page_size} tokens and one of padding need "
                f"{format_bytes(2 * page_bytes)}, the plan leaves "
                f"{format_bytes(plan.kv_bytes)}; raise memory.fraction or device.memory_bytes, "
                "or reserve less:\n" + plan.render(0, "no page fits")
            )
        shape = (2, self.num_pages + 1, heads, cfg.page_size, head_dim)
        self.layers = [device.zeros(shape, model.dtype) for _ in range(layers)]
        logger.info("kv_pool: {} tokens, {}", self.num_tokens, format_bytes(self.num_bytes))

    @property
    def null_page(self) -> int:
        """The page that nobody owns and that is always zero."""
        return self.num_pages

    def zero(self, pages: list[int]) -> None:
        """Zero keys and values of `pages` in all layers."""
        index = torch.tensor(pages, device=self.layers[0].device)
        for layer in self.layers:
            layer.index_fill_(1, index, 0)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Bytes held, the page of padding included."""
        return (self.num_tokens + self.page_size) * self.bytes_per_token

    def render_plan(self) -> str:
        """The memory plan with this pool's line."""
        what = f"{self.num_tokens} tokens, {self.num_pages} pages of {self.page_size}"
        return self.plan.render(self.num_bytes, what)
