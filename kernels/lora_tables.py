"""Which rows of the rank pool each token of a decode step uses, as tables on the device.

Tokens come in tiles of TILE neighbours, pool rows in blocks of BLOCK. An item is one block that
some token of one tile uses, with a weight for each of the tile's tokens: 0 says not this one. Items
lie tile by tile, so that kernels find a tile's with two numbers, and their count is read on the
device: one captured graph serves every mix of adapters, ranks and base tokens. Vectors (gains,
biases) are items of a single pool row. Knows nothing of who owns which rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

TILE = 16
BLOCK = 16


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Token `token` uses pool rows `row_start`..`row_stop`, multiples of BLOCK, with `weight`.

    `gain_row` and `bias_row` are pool rows of b that hold gain - 1 and a bias, None if there is
    none.
    """

    token: int
    row_start: int
    row_stop: int
    weight: float = 1.0
    gain_row: int | None = None
    bias_row: int | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """`starts` int32 [max_tiles + 1]: tile t has items starts[t]..starts[t + 1], the last is their
    count. `tiles`, `rows` int32 [max_items]: an item's tile and first pool row. `weights` float32
    [max_items, TILE]. What lies beyond the count is old and must not be used.
    """

    starts: torch.Tensor
    tiles: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def num_numbers(max_tiles: int, max_items: int) -> int:
        return max_tiles + 1 + max_items * (2 + TILE)

    @classmethod
    def of(cls, packed: torch.Tensor, max_tiles: int, max_items: int) -> "Items":
        """Views of `packed`, int32 [num_numbers]."""
        sizes = [max_tiles + 1, max_items, max_items, max_items * TILE]
        starts, tiles, rows, weights = torch.split(packed, sizes)
        return cls(starts, tiles, rows, weights.view(torch.float32).view(max_items, TILE))

    @property
    def max_items(self) -> int:
        return self.rows.shape[0]

    def fill(self, found: dict[tuple[int, int], np.ndarray]) -> None:
        """Write on the host: weights float32 [TILE] by (tile, first pool row).

        Raises ValueError if there are more than `max_items`.
        """
        if len(found) > self.max_items:
            raise ValueError(f"{len(found)} items, the tables hold {self.max_items}")
        keys = sorted(found)
        tiles = np.array([tile for tile, _ in keys], dtype=np.int32)
        self.starts.numpy()[:] = np.searchsorted(tiles, np.arange(self.starts.shape[0]))
        self.tiles.numpy()[: len(keys)] = tiles
        self.rows.numpy()[: len(keys)] = [row for _, row in keys]
        if keys:
            self.weights.numpy()[: len(keys)] = [found[key] for key in keys]


@dataclass(frozen=True, slots=True)
class LoRATables:
    """Items of the pool's blocks, of gains and of biases, in one `packed` int32 tensor that lies at
    one address for life, so that a step's tables are one copy.
    """

    packed: torch.Tensor
    blocks: Items
    gains: Items
    biases: Items

    @classmethod
    def empty(
        cls, max_tokens: int, max_blocks: int, max_vectors: int, device: torch.device
    ) -> "LoRATables":
        """Tables without items. `max_tokens` of a step; `max_blocks` items of blocks,
        `max_vectors` items of gains, and as many of biases. Host memory is pinned if there is CUDA.
        """
        max_tiles = -(-max_tokens // TILE)
        limits = (max_blocks, max_vectors, max_vectors)
        sizes = [Items.num_numbers(max_tiles, limit) for limit in limits]
        pinned = device.type == "cpu" and torch.cuda.is_available()
        packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device, pin_memory=pinned)
        parts = zip(torch.split(packed, sizes), limits, strict=True)
        return cls(packed, *(Items.of(part, max_tiles, limit) for part, limit in parts))

    def fill(self, uses: Sequence[TokenUse]) -> None:
        """Write `uses` on the host. Raises ValueError if they do not fit."""
        blocks: dict[tuple[int, int], np.ndarray] = {}
        gains: dict[tuple[int, int], np.ndarray] = {}
        biases: dict[tuple[int, int], np.ndarray] = {}
        for use in uses:
            for row in range(use.row_start, use.row_stop, BLOCK):
                _note(blocks, use, row)
            if use.gain_row is not None:
                _note(gains, use, use.gain_row)
            if use.bias_row is not None:
                _note(biases, use, use.bias_row)
        self.blocks.fill(blocks)
        self.gains.fill(gains)
        self.biases.fill(biases)

    def copy_from(self, host: "LoRATables") -> None:
        """Take the tables of `host`, of the same limits, by one copy that does not wait."""
        self.packed.copy_(host.packed, non_blocking=True)

    def check(self, name: str, x: torch.Tensor) -> None:
        """ValueError if `x` [T, ...] has more tokens than the tables or is on another device."""
        max_tokens = (self.blocks.starts.shape[0] - 1) * TILE
        if x.shape[0] > max_tokens:
            found = f"{name} has {x.shape[0]} tokens"
            raise ValueError(f"{found}, expected {max_tokens} as the tables or fewer")
        if self.packed.device != x.device:
            raise ValueError(f"tables are on {self.packed.device}, expected {x.device} as {name}")


def _note(found: dict[tuple[int, int], np.ndarray], use: TokenUse, row: int) -> None:
    tile, place = divmod(use.token, TILE)
    weights = found.get((tile, row))
    if weights is None:
        weights = found[tile, row] = np.zeros(TILE, dtype=np.float32)
    weights[place] += use.weight
