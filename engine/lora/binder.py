"""Binds a step's rows to the rank pool, and keeps what was bound last: decoding binds once and not
per token.
"""

from collections.abc import Sequence
from typing import Any

from engine.device import Device
from engine.lora.adapter import Part
from engine.lora.batch import Placement, Portion, bind_work
from engine.models.decoder import DecoderModel

Row = tuple[Sequence[tuple[Placement, float]], int]
Key = tuple[tuple[Portion, ...], int]


class StepBinder:
    """One binding per part of the model, valid as long as the same rows come.

    `tables` makes those of layers and head, and what decode graphs need, if the ops take tables.
    """

    def __init__(self, model: DecoderModel, device: Device) -> None:
        self._device = device.torch_device
        self._dtype = model.dtype
        self._bound: dict[Part, tuple[Key, Any]] = {}
        self._used: tuple[tuple[Portion, ...], list[Any]] | None = None
        self.tables: Any = None
        if model.ops.lora_by_tables:
            from engine.lora.table_batch import TableBinder

            self.tables = TableBinder(model, device)

    def bind(self, part: Part, rows: Sequence[Row]) -> Any:
        """`rows`: (placement, weight) of each of the row's adapters, and its number of tokens. What
        the ops' `bind_lora` takes, or None if no adapter changes the part.
        """
        key = (portions_of(rows), sum(num_tokens for _, num_tokens in rows))
        if part not in self._bound or self._bound[part][0] != key:
            self._bound[part] = (key, self.make(part, *key))
        return self._bound[part][1]

    def layer_uses(self, rows: Sequence[Row]) -> list[Any]:
        """What a GraphBatch takes for the layers: the same list as long as the same rows come."""
        portions = portions_of(rows)
        if self._used is None or self._used[0] != portions:
            self._used = (portions, self.tables.layer_uses(portions))
        return self._used[1]

    def make(self, part: Part, portions: tuple[Portion, ...], num_tokens: int) -> Any:
        """A binding that is not kept."""
        if self.tables is None or part is Part.embedding:
            return bind_work(part, portions, self._device, self._dtype)
        return self.tables.bind(part, portions, num_tokens)


def portions_of(rows: Sequence[Row]) -> tuple[Portion, ...]:
    """Adapters by token range, neighbours of the same one and only adapter joined."""
    portions: list[Portion] = []
    token = 0
    for uses, num_tokens in rows:
        start, token = token, token + num_tokens
        alone = len(uses) == 1
        for placement, weight in uses:
            last = portions[-1] if portions else None
            if (
                last is not None
                and alone
                and last.alone
                and last.placement is placement
                and last.weight == weight
                and last.stop == start
            ):
                portions.pop()
                portions.append(Portion(last.start, token, placement, weight))
            else:
                portions.append(Portion(start, token, placement, weight, alone))
    return tuple(portions)
