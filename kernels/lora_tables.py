"""Which rows of the rank pool each token of a step uses, as tables on the device.

Tokens come in tiles of TILE neighbours, pool rows in blocks of BLOCK. An item is one block that
some token of one tile uses, with a weight for each of the tile's tokens: 0 says not this one. Items
lie tile by tile, so that kernels find a tile's with two numbers, and their count is read on the
device: one captured graph serves every mix of adapters, ranks and base tokens. Vectors (gains,
biases) are items of a single pool row. Knows nothing of who owns which rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

TILE = 16
BLOCK = 16


@dataclass(frozen=True, slots=True)
class TokenUse:
    """`num_tokens` tokens from `token` on use pool rows `row_start`..`row_stop`, multiples of
    BLOCK, with `weight`.

    `gain_row` and `bias_row` are pool rows of b that hold gain - 1 and a bias, None if there is
    none.
    """

    token: int
    row_start: int
    row_stop: int
    weight: float = 1.0
    gain_row: int | None = None
    bias_row: int | None = None
    num_tokens: int = 1


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
        return sum(_part_sizes(max_tiles, max_items))

    @classmethod
    def of(cls, packed: torch.Tensor, max_tiles: int, max_items: int) -> "Items":
        """Views of `packed`, int32 [num_numbers]."""
        parts = torch.split(packed, _part_sizes(max_tiles, max_items))
        starts, tiles, rows, weights = parts
        weights = weights.view(torch.float32).view(max_items, TILE)
        return cls(starts[: max_tiles + 1], tiles[:max_items], rows[:max_items], weights)

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

    @staticmethod
    def num_bytes(max_tokens: int, max_blocks: int, max_vectors: int) -> int:
        """Bytes of tables with these limits."""
        return 4 * sum(_table_sizes(max_tokens, max_blocks, max_vectors))

    @classmethod
    def empty(
        cls, max_tokens: int, max_blocks: int, max_vectors: int, device: torch.device
    ) -> "LoRATables":
        """Tables without items. `max_tokens` of a step; `max_blocks` items of blocks,
        `max_vectors` items of gains, and as many of biases. Host memory is pinned if there is CUDA.
        """
        max_tiles = -(-max_tokens // TILE)
        limits = (max_blocks, max_vectors, max_vectors)
        sizes = _table_sizes(max_tokens, max_blocks, max_vectors)
        pinned = device.type == "cpu" and torch.cuda.is_available()
        packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device, pin_memory=pinned)
        parts = zip(torch.split(packed, sizes), limits, strict=True)
        return cls(packed, *(Items.of(part, max_tiles, limit) for part, limit in parts))

    @classmethod
    def of(cls, uses: Sequence[TokenUse], num_tokens: int, device: torch.device) -> "LoRATables":
        """Tables of `uses` in a step of `num_tokens`, no larger than they must be, by one copy that
        does not wait.
        """
        found = _find(uses)
        max_vectors = max(len(found.gains), len(found.biases))
        host = cls.empty(num_tokens, len(found.blocks), max_vectors, torch.device("cpu"))
        host._write(found)
        if device.type == "cpu":
            return host
        tables = cls.empty(num_tokens, len(found.blocks), max_vectors, device)
        tables.copy_from(host)
        return tables

    def fill(self, uses: Sequence[TokenUse]) -> None:
        """Write `uses` on the host. Raises ValueError if they do not fit."""
        self._write(_find(uses))

    def _write(self, found: "_Found") -> None:
        self.blocks.fill(found.blocks)
        self.gains.fill(found.gains)
        self.biases.fill(found.biases)

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


def _table_sizes(max_tokens: int, max_blocks: int, max_vectors: int) -> list[int]:
    """Numbers of the items of blocks, of gains and of biases."""
    max_tiles = -(-max_tokens // TILE)
    return [Items.num_numbers(max_tiles, limit) for limit in (max_blocks, max_vectors, max_vectors)]


def _part_sizes(max_tiles: int, max_items: int) -> list[int]:
    """Numbers of starts, tiles, rows and weights, each part padded to 16 bytes: kernels are
    compiled for aligned addresses.
    """
    sizes = (max_tiles + 1, max_items, max_items, max_items * TILE)
    return [-(-size // 4) * 4 for size in sizes]


@dataclass(frozen=True, slots=True)
class _Found:
    """Weights float32 [TILE] by (tile, first pool row), of each kind of item."""

    blocks: dict[tuple[int, int], np.ndarray]
    gains: dict[tuple[int, int], np.ndarray]
    biases: dict[tuple[int, int], np.ndarray]


def _find(uses: Sequence[TokenUse]) -> _Found:
    kinds: list[dict[tuple[int, int], np.ndarray]] = [
        defaultdict(lambda: np.zeros(TILE, dtype=np.float32)) for _ in range(3)
    ]
    blocks, gains, biases = kinds
    for use in uses:
        for tile, own in _tiles(use):
            for row in range(use.row_start, use.row_stop, BLOCK):
                blocks[tile, row][own] += use.weight
            if use.gain_row is not None:
                gains[tile, use.gain_row][own] += use.weight
            if use.bias_row is not None:
                biases[tile, use.bias_row][own] += use.weight
    return _Found(*kinds)


def _tiles(use: TokenUse) -> Iterator[tuple[int, slice]]:
    """The tiles that the use's tokens lie in, and their places there."""
    stop = use.token + use.num_tokens
    for tile in range(use.token // TILE, -(-stop // TILE)):
        yield tile, slice(max(use.token - tile * TILE, 0), min(stop - tile * TILE, TILE))
