"""The LoRA shrink in Triton: what a step's tokens make of the pool's rows that they use.

Shapes: T tokens, I in, R rows of the pool, M members of a fused projection, S splits of I. A unit
is one split of one item for one member; the last of an item's units to finish adds the splits up,
in their order. How I is split depends on I alone, so neither other tokens nor the order in which
units finish change a bit of a token's result. `shrink_items` is for kernels that do it beside other
work. Knows nothing of who owns which rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import DTYPES, is_interpreted, layout, refuse
from engine.kernels.lora_tables import BLOCK, TILE, LoRATables

_SPLIT_INPUTS = 2048
_STEP_BYTES = 512
_PROGRAMS_PER_SM = 3
_WARPS, _STAGES = 4, 4


@dataclass(frozen=True, slots=True)
class ShrinkWorkspace:
    """What launches share, one after the other: partial sums and counts of finished splits.

    partials float32 [n * S * 256] and counters int32 [n], zero between launches, n = most (item,
    member)s of a launch; unused if S is 1. Two launches at once need two workspaces.
    """

    partials: torch.Tensor
    counters: torch.Tensor
    num_sms: int


def shrink_workspace_bytes(*, max_items: int, shapes: Iterable[tuple[int, int]]) -> int:
    """Bytes of `shrink_workspace` with the same arguments."""
    return 4 * sum(_workspace_sizes(max_items, shapes))


def shrink_workspace(
    *, max_items: int, shapes: Iterable[tuple[int, int]], num_sms: int, device: torch.device
) -> ShrinkWorkspace:
    """For tables of up to `max_items` block items and projections of `shapes` (M, I)."""
    num_partials, num_counters = _workspace_sizes(max_items, shapes)
    return ShrinkWorkspace(
        torch.empty(num_partials, dtype=torch.float32, device=device),
        torch.zeros(num_counters, dtype=torch.int32, device=device),
        num_sms,
    )


def shrink(
    x: torch.Tensor, a: torch.Tensor, tables: LoRATables, workspace: ShrinkWorkspace
) -> torch.Tensor:
    """x [T, I], a [R, M, I] of one floating dtype -> h [max_items, M, 16, 16] in it: what the
    tokens of a block item's tile make of the block's rows, times their weights; tokens of weight 0
    get 0. Items beyond the count are not written.

    One launch whose grid depends on shapes alone; ValueError on shapes, dtypes and devices that do
    not fit.
    """
    check_shrink(x, a, tables, workspace)
    h = new_h(x, a, tables)
    programs = min(num_units(h, x), workspace.num_sms * _PROGRAMS_PER_SM)
    if programs:
        shrink_items[(programs,)](
            x,
            *shrink_pointers(a, h, tables, workspace),
            x.stride(0),
            x.shape[0],
            x.shape[1],
            0,
            programs,
            **shrink_constants(x, a),
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return h


def new_h(x: torch.Tensor, a: torch.Tensor, tables: LoRATables) -> torch.Tensor:
    return x.new_empty((tables.blocks.max_items, a.shape[1], TILE, BLOCK))


def num_units(h: torch.Tensor, x: torch.Tensor) -> int:
    """Units of a launch whose tables are full."""
    return h.shape[0] * h.shape[1] * _num_splits(x.shape[1])


def shrink_pointers(
    a: torch.Tensor, h: torch.Tensor, tables: LoRATables, workspace: ShrinkWorkspace
) -> tuple[torch.Tensor, ...]:
    """Pointer arguments of `shrink_items` after x, in its order."""
    items = tables.blocks
    pointers = (a, h, items.starts[-1:], items.tiles, items.rows, items.weights)
    return (*pointers, workspace.partials, workspace.counters)


def shrink_constants(x: torch.Tensor, a: torch.Tensor | None) -> dict[str, object]:
    """Constant arguments of `shrink_items`; a None: any, it will not run."""
    step = _STEP_BYTES // x.dtype.itemsize
    return {
        "MEMBERS": 1 if a is None else a.shape[1],
        "SPLITS": _num_splits(x.shape[1]),
        "SPLIT_INPUTS": _SPLIT_INPUTS,
        "STEP": step,
        "STEP_EVEN": x.shape[1] % step == 0,
        "WIDEN": is_interpreted(),
    }


def check_matrix(x: torch.Tensor, name: str, matrix: torch.Tensor, shape: str) -> None:
    """ValueError if `x` is no [T, I] or `matrix` does not fit it and `shape`, which ends in I."""
    if x.dim() != 2 or 0 in x.shape or x.stride(1) != 1:
        refuse("x", layout(x), "[T, I], neither 0, with I contiguous")
    if x.dtype not in DTYPES or matrix.dtype is not x.dtype:
        found = f"{x.dtype} and {matrix.dtype}"
        raise ValueError(f"x and {name} are {found}, expected the same of {DTYPES}")
    fits = matrix.dim() == len(shape.split(",")) and matrix.shape[-1] == x.shape[1]
    if not fits or 0 in matrix.shape or not matrix.is_contiguous():
        refuse(name, layout(matrix), f"{shape} contiguous with I {x.shape[1]}")
    if matrix.device != x.device:
        raise ValueError(f"{name} is on {matrix.device}, expected {x.device} as x")


def check_shrink(
    x: torch.Tensor, a: torch.Tensor, tables: LoRATables, workspace: ShrinkWorkspace
) -> None:
    """ValueError on the first thing that the shrink does not take."""
    check_matrix(x, "a", a, "[R, M, I]")
    tables.check("x", x)
    needs = _workspace_sizes(tables.blocks.max_items, [(a.shape[1], x.shape[1])])
    has = (workspace.partials.numel(), workspace.counters.numel())
    if any(size < need for size, need in zip(has, needs, strict=True)):
        raise ValueError(f"workspace has {has} partials and counters, expected {needs} or more")
    if workspace.partials.device != x.device:
        raise ValueError(f"workspace is on {workspace.partials.device}, expected {x.device} as x")


def _num_splits(width_in: int) -> int:
    return -(-width_in // _SPLIT_INPUTS)


def _workspace_sizes(max_items: int, shapes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Numbers of partial sums and of counters."""
    split = [(members, _num_splits(width)) for members, width in shapes if width > _SPLIT_INPUTS]
    parts = max((members * splits for members, splits in split), default=0)
    members = max((members for members, _ in split), default=0)
    return max_items * parts * TILE * BLOCK, max_items * members


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tokens", "before", "programs"],
    do_not_specialize_on_alignment=["count_ptr"],
)
def shrink_items(  # type: ignore[no-untyped-def]
    x_ptr,
    a_ptr,
    h_ptr,
    count_ptr,
    tiles_ptr,
    rows_ptr,
    weights_ptr,
    partials_ptr,
    counters_ptr,
    x_stride,
    num_tokens,
    inputs,
    before,
    programs,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    STEP: tl.constexpr,
    STEP_EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The units up to the count that the tables hold, shared by the launch's `programs` programs
    after the first `before`, which do other work.
    """
    SIDE: tl.constexpr = 16
    side, lanes = tl.arange(0, SIDE), tl.arange(0, STEP)
    in_part = side[:, None] * SIDE + side[None, :]
    num_units = tl.load(count_ptr) * (MEMBERS * SPLITS)
    for unit in range(tl.program_id(0) - before, num_units, programs):
        pair, split = unit // SPLITS, unit % SPLITS
        item, member = pair // MEMBERS, pair % MEMBERS
        tokens = tl.load(tiles_ptr + item) * SIDE + side
        rows = tl.load(rows_ptr + item) + side
        in_tokens = (tokens < num_tokens)[:, None]
        x_at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + lanes[None, :]
        a_rows = (rows.to(tl.int64) * MEMBERS + member) * inputs
        a_at = a_ptr + a_rows[None, :] + lanes[:, None]
        start = split * SPLIT_INPUTS
        acc = tl.zeros([SIDE, SIDE], tl.float32)
        for begin in range(start, tl.minimum(start + SPLIT_INPUTS, inputs), STEP):
            if STEP_EVEN:
                x = tl.load(x_at + begin, mask=in_tokens, other=0.0)
                a = tl.load(a_at + begin)
            else:
                live = begin + lanes < inputs
                x = tl.load(x_at + begin, mask=in_tokens & live[None, :], other=0.0)
                a = tl.load(a_at + begin, mask=live[:, None], other=0.0)
            if WIDEN:
                x, a = x.to(tl.float32), a.to(tl.float32)
            acc = tl.dot(x, a, acc, input_precision="tf32x3")
        last = SPLITS == 1
        if SPLITS > 1:
            tl.store(partials_ptr + unit * (SIDE * SIDE) + in_part, acc)
            # All threads' stores come before the count, the count of the last before its loads.
            tl.debug_barrier()
            last = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            if SPLITS > 1:
                tl.store(counters_ptr + pair, 0)
                acc = tl.zeros([SIDE, SIDE], tl.float32)
                parts_at = partials_ptr + pair * (SPLITS * SIDE * SIDE) + in_part
                for part in tl.static_range(SPLITS):
                    acc += tl.load(parts_at + part * (SIDE * SIDE), cache_modifier=".cg")
            weights = tl.load(weights_ptr + item * SIDE + side)[:, None]
            acc = tl.where(weights != 0, weights * acc, 0.0)
            h_at = h_ptr + pair * (SIDE * SIDE) + in_part
            tl.store(h_at, acc.to(h_ptr.dtype.element_ty))
