"""The static inputs of decode graphs: tensors at one address for life, filled before each replay by
one packed copy. Knows nothing of graphs, models or adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Token ids, positions, slots and lengths: one number of each for a row.
_COLUMNS = 4
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One row's new token: its id, its position, its slot (page * page_size + offset within the
    page), and the row's pages.
    """

    token_id: int
    position: int
    slot: int
    pages: Sequence[int]


class DecodeInputs:
    """Inputs for up to `max_rows` rows of up to `max_pages` pages.

    token_ids, positions, slots and lengths int32 [max_rows]; page_table int32 [max_rows,
    max_pages]; hidden [max_rows, hidden_size], embedded tokens before a replay and hidden states
    after it. Rows that are padding have length 0 and no slot.
    """

    def __init__(
        self,
        max_rows: int,
        max_pages: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = _COLUMNS * max_rows + max_rows * max_pages
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staged, self._staged_before = (
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        )
        columns = self._packed[: _COLUMNS * max_rows].view(_COLUMNS, max_rows)
        self.token_ids, self.positions, self.slots, self.lengths = columns
        self.page_table = torch.zeros((max_rows, max_pages), dtype=torch.int32, device=device)
        self.hidden = torch.zeros((max_rows, hidden_size), dtype=dtype, device=device)
        self._max_rows = max_rows
        self._pages: list[list[int]] = []

    @staticmethod
    def num_bytes(max_rows: int, max_pages: int, hidden_size: int, dtype: torch.dtype) -> int:
        """Device bytes of such inputs."""
        numbers = _COLUMNS * max_rows + 2 * max_rows * max_pages
        return 4 * numbers + max_rows * hidden_size * dtype.itemsize

    def fill(self, rows: Sequence[DecodeRow], padded_rows: int) -> None:
        """Describe a step of `rows`, padded to `padded_rows`. The copies do not wait: those of the
        step before the last must be done, which they are once its tokens were read.
        """
        self._staged, self._staged_before = self._staged_before, self._staged
        count, staged = len(rows), self._staged.numpy()
        columns = staged[: _COLUMNS * self._max_rows].reshape(_COLUMNS, self._max_rows)
        columns[0, :count] = [row.token_id for row in rows]
        columns[1, :count] = [row.position for row in rows]
        columns[2, :count] = [row.slot for row in rows]
        columns[3, :count] = columns[1, :count] + 1
        padding = np.array([[0], [0], [NO_SLOT], [0]], dtype=np.int32)
        columns[:, count:padded_rows] = padding
        stop = columns.size
        pages = [list(row.pages) for row in rows]
        width = 0
        if pages != self._pages:
            width = max(map(len, pages))
            stop += count * width
            table = staged[columns.size : stop].reshape(count, width)
            for own, numbers in zip(table, pages, strict=True):
                own[: len(numbers)] = numbers
                own[len(numbers) :] = 0
        self._packed[:stop].copy_(self._staged[:stop], non_blocking=True)
        if width:
            self._pages = pages
            table_rows = self._packed[columns.size : stop].view(count, width)
            self.page_table[:count, :width].copy_(table_rows)
