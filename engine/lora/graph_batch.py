"""The adapters of a captured decode step: tables at one address for life, which are filled anew
whenever other rows come, so that one graph serves every mix of adapters, ranks and base rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from engine.kernels.fused_lora import TableWork
from engine.kernels.lora_shrink import shrink_workspace, shrink_workspace_bytes
from engine.kernels.lora_tables import BLOCK, LoRATables, TokenUse


class GraphBatch:
    """`work` is what a graph is captured with; it holds one adapter of `max_rank` for each of
    `max_tokens` tokens, or as many blocks of smaller ones.
    """

    def __init__(
        self,
        shapes: Iterable[tuple[int, int]],
        num_sms: int,
        max_tokens: int,
        max_rank: int,
        device: torch.device,
    ) -> None:
        """`shapes`: (members, in_features) of the layers."""
        max_blocks = _max_blocks(max_tokens, max_rank)
        self._host = LoRATables.empty(max_tokens, max_blocks, max_tokens, torch.device("cpu"))
        tables = LoRATables.empty(max_tokens, max_blocks, max_tokens, device)
        workspace = shrink_workspace(
            max_items=max_blocks, shapes=shapes, num_sms=num_sms, device=device
        )
        self.work = TableWork(tables, workspace)
        self._uses: tuple[TokenUse, ...] = ()
        self._copied: Any = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @staticmethod
    def num_bytes(shapes: Iterable[tuple[int, int]], max_tokens: int, max_rank: int) -> int:
        """Device bytes of such a batch."""
        max_blocks = _max_blocks(max_tokens, max_rank)
        tables = LoRATables.num_bytes(max_tokens, max_blocks, max_tokens)
        return tables + shrink_workspace_bytes(max_items=max_blocks, shapes=shapes)

    def fill(self, uses: Sequence[TokenUse]) -> bool:
        """Take `uses` for the steps to come; False if there is no room for them."""
        if tuple(uses) == self._uses:
            return True
        if self._copied is not None:
            self._copied.synchronize()
        try:
            self._host.fill(uses)
        except ValueError:  # more items than the tables hold
            return False
        self.work.tables.copy_from(self._host)
        if self._copied is not None:
            self._copied.record()
        self._uses = tuple(uses)
        return True


def _max_blocks(max_tokens: int, max_rank: int) -> int:
    return max_tokens * -(-max_rank // BLOCK)
