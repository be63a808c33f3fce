"""Cases of the LoRA kernels of a decode step: shrink, expand, and a projection with its shrink.

A mix says which adapters a batch uses. Tables are as large as an engine's, so that grids are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from engine.bench.attention_cases import Target
from engine.bench.kernel_case import Case, Prepared, deviation
from engine.bench.shapes import ITEM_BYTES, ModelShape, Projection
from engine.kernels import linear_shrink_reference as reference
from engine.kernels.linear_shrink import linear_shrink
from engine.kernels.lora_expand import expand_add
from engine.kernels.lora_shrink import ShrinkWorkspace, shrink, shrink_workspace
from engine.kernels.lora_tables import BLOCK, TILE, LoRATables, TokenUse

_MAX_ITEMS, _MAX_VECTORS = 512, 8


@dataclass(frozen=True, slots=True)
class Mix:
    """A batch of one token a row; row i uses adapter i modulo their number, of `ranks[...]`, or
    with `by_adapter` rows of one adapter are neighbours. No ranks: base traffic.
    """

    tokens: int
    ranks: tuple[int, ...] = ()
    by_adapter: bool = False

    @property
    def words(self) -> str:
        batch = f"batch {self.tokens}"
        if not self.ranks:
            return f"{batch}, no adapter"
        same = len(set(self.ranks)) == 1
        rank = f"r{self.ranks[0]}" if same else f"r{min(self.ranks)}-{max(self.ranks)}"
        order = ", rows by adapter" if self.by_adapter else ""
        return f"{batch}, {len(self.ranks)} x {rank}{order}"

    def uses(self) -> list[TokenUse]:
        """Adapters' rows follow each other in the pool, whole blocks each."""
        spans, start = [], 0
        for rank in self.ranks:
            stop = start + -(-rank // BLOCK) * BLOCK
            spans.append((start, stop))
            start = stop
        count = len(spans)
        if not count:
            return []
        owners = [
            token * count // self.tokens if self.by_adapter else token % count
            for token in range(self.tokens)
        ]
        return [TokenUse(token, *spans[owner]) for token, owner in enumerate(owners)]


@dataclass(frozen=True, slots=True)
class _Step:
    """Tables of a mix on the device; `num_rows` of the pool are in use."""

    tables: LoRATables
    workspace: ShrinkWorkspace
    num_rows: int
    num_items: int
    pool_rows: int


def linear_cases(
    shape: ModelShape, mixes: Sequence[Mix], target: Target, *, early: bool
) -> Iterator[Case]:
    """`early`: as behind another kernel, whose end they overlap."""
    name = "linear_shrink, early" if early else "linear_shrink"
    for own in shape.projections:
        for mix in mixes:
            prepare = partial(_linear, own, mix, target, early)
            yield Case(name, f"{own.name}, {mix.words}", prepare)


def shrink_cases(shape: ModelShape, mixes: Sequence[Mix], target: Target) -> Iterator[Case]:
    for own in shape.projections:
        for mix in mixes:
            yield Case("shrink", f"{own.name}, {mix.words}", partial(_shrink, own, mix, target))


def expand_cases(shape: ModelShape, mixes: Sequence[Mix], target: Target) -> Iterator[Case]:
    for own in shape.projections:
        for mix in mixes:
            yield Case("expand_add", f"{own.name}, {mix.words}", partial(_expand, own, mix, target))


def _step(own: Projection, mix: Mix, target: Target) -> _Step:
    uses = mix.uses()
    limits = (max(TILE, mix.tokens), _MAX_ITEMS, _MAX_VECTORS)
    host = LoRATables.empty(*limits, torch.device("cpu"))
    host.fill(uses)
    tables = LoRATables.empty(*limits, target.device)
    tables.copy_from(host)
    shapes = [(len(own.widths), own.inputs)]
    workspace = shrink_workspace(
        max_items=_MAX_ITEMS, shapes=shapes, num_sms=target.num_sms, device=target.device
    )
    rows = {row for use in uses for row in range(use.row_start, use.row_stop)}
    num_items = int(host.blocks.starts[-1])
    pool_rows = max((use.row_stop for use in uses), default=BLOCK)
    return _Step(tables, workspace, len(rows), num_items, pool_rows)


def _shrink_work(own: Projection, step: _Step, tokens: int) -> tuple[int, int]:
    """Bytes beside x, and operations, of a shrink."""
    members = len(own.widths)
    numbers = step.num_rows * members * own.inputs + step.num_items * members * TILE * BLOCK
    return ITEM_BYTES * numbers, 2 * TILE * BLOCK * step.num_items * members * own.inputs


def _pool_a(own: Projection, step: _Step, target: Target) -> torch.Tensor:
    members = len(own.widths)
    return target.random(step.pool_rows, members, own.inputs, scale=own.inputs**-0.5)


def _linear(own: Projection, mix: Mix, target: Target, early: bool) -> Prepared:
    step, x = _step(own, mix, target), target.random(mix.tokens, own.inputs)
    weight = target.random(own.outputs, own.inputs, scale=own.inputs**-0.5)
    a, tables, count = _pool_a(own, step, target), step.tables, step.num_items

    def call() -> object:
        return linear_shrink(x, weight, a, tables, step.workspace, early=early)

    def peer() -> torch.Tensor:
        return F.linear(x, weight)

    def off_by() -> float:
        found = linear_shrink(x, weight, a, tables, step.workspace, early=early)
        expected = reference.linear_shrink(x, weight, a, tables)
        ys = found.y.float().sum(0), expected.y[0]
        if not count or found.h is None or expected.h is None:
            return deviation(ys[:1], ys[1:])
        return deviation([ys[0], found.h[:count]], [ys[1], expected.h[:count]])

    shrink_bytes, shrink_flops = _shrink_work(own, step, mix.tokens)
    numbers = x.numel() + weight.numel() + mix.tokens * own.outputs
    flops = 2 * mix.tokens * weight.numel() + shrink_flops
    return Prepared(call, off_by, ITEM_BYTES * numbers + shrink_bytes, flops, peer, "linear")


def _shrink(own: Projection, mix: Mix, target: Target) -> Prepared:
    step, x = _step(own, mix, target), target.random(mix.tokens, own.inputs)
    a = _pool_a(own, step, target)

    def call() -> torch.Tensor:
        return shrink(x, a, step.tables, step.workspace)

    def off_by() -> float:
        count = step.num_items
        if not count:
            return 0.0
        expected = reference.shrink(x, a, step.tables.blocks)
        return deviation([call()[:count]], [expected[:count]])

    num_bytes, flops = _shrink_work(own, step, mix.tokens)
    return Prepared(call, off_by, num_bytes + ITEM_BYTES * x.numel(), flops)


def _expand(own: Projection, mix: Mix, target: Target) -> Prepared:
    step, members = _step(own, mix, target), len(own.widths)
    y, b = target.random(mix.tokens, own.outputs), target.random(step.pool_rows, own.outputs)
    h, tables = target.random(_MAX_ITEMS, members, TILE, BLOCK, scale=0.1), step.tables

    def call() -> None:
        expand_add(y, h, b, tables, own.widths, None)

    def off_by() -> float:
        wanted = y.float()
        reference.expand_add(wanted, h, b, tables, own.widths, None)
        call()
        return deviation([y], [wanted])

    used = 2 * y.numel() if step.num_items else 0
    numbers = used + step.num_rows * own.outputs + step.num_items * members * TILE * BLOCK
    flops = 2 * BLOCK * TILE * step.num_items * own.outputs
    return Prepared(call, off_by, ITEM_BYTES * numbers, flops)
