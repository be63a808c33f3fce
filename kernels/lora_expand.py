"""The LoRA expand in Triton: adds to a projection's output what its tokens' adapters make of it.

Shapes: T tokens, O out, R rows of the pool, M members of a fused projection. A program adds one
tile's items, one after the other, to one block of one member's columns; a tile without items costs
six numbers read. What an item makes of a token that it has no weight for is left out, and nothing
but the token's own items is added to it, in the order of their rows, so no token's result depends
on the others. Knows nothing of who owns which rows.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import DTYPES, is_interpreted, layout, refuse
from engine.kernels.lora_tables import BLOCK, TILE, Items, LoRATables

# Columns of a program, the widest that makes this many programs and fits all members.
_COLUMNS = (128, 64, 32)
_FEWEST_PROGRAMS = 256
# Triton 3.7 splits the depth between an item's row number and what lies there: 4 blocks in flight.
_STAGES = 9


def expand_add(
    y: torch.Tensor,
    h: torch.Tensor | None,
    b: torch.Tensor,
    tables: LoRATables,
    widths: tuple[int, ...],
    base_bias: torch.Tensor | None,
) -> None:
    """Add gains, blocks' deltas and biases to y [T, O], in place: the base product, with base_bias
    [O] already added if there is one.

    h [max_items, M, 16, 16] of `shrink`, None: no deltas; b [R, O] of one dtype with h, which need
    not be y's. `widths` are the members' parts of O, in order. Computed in float32 and rounded
    once; tokens without a weight keep their bits. One launch whose grid depends on shapes alone;
    ValueError on shapes, dtypes and devices that do not fit.
    """
    _check(y, h, b, tables, widths, base_bias)
    num_tokens, outputs = y.shape
    tiles = triton.cdiv(num_tokens, TILE)
    columns = _columns(tiles, widths)
    blocks = sum(triton.cdiv(width, columns) for width in widths)
    _expand_kernel[(tiles, blocks)](
        y,
        h,
        b,
        base_bias,
        *_pointers(tables.blocks),
        *_pointers(tables.gains),
        *_pointers(tables.biases),
        y.stride(0),
        num_tokens,
        outputs,
        WIDTHS=widths,
        MEMBERS=len(widths),
        COLUMNS=columns,
        EVEN=all(width % columns == 0 for width in widths),
        WIDEN=is_interpreted(),
        num_warps=2 if columns == 32 else 4,
        num_stages=_STAGES,
    )


def _columns(tiles: int, widths: tuple[int, ...]) -> int:
    for columns in _COLUMNS:
        fits = all(width % columns == 0 for width in widths)
        if fits and tiles * sum(widths) >= columns * _FEWEST_PROGRAMS:
            return columns
    return _COLUMNS[-1]


def _pointers(items: Items) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return items.starts, items.rows, items.weights


def _check(
    y: torch.Tensor,
    h: torch.Tensor | None,
    b: torch.Tensor,
    tables: LoRATables,
    widths: tuple[int, ...],
    base_bias: torch.Tensor | None,
) -> None:
    """ValueError on the first thing that the expand does not take."""

    if y.dim() != 2 or 0 in y.shape or y.stride(1) != 1 or y.stride(0) < y.shape[1]:
        refuse("y", layout(y), "[T, O], neither 0, with O contiguous and rows apart")
    outputs = y.shape[1]
    if b.dim() != 2 or b.shape[1] != outputs or not b.is_contiguous():
        refuse("b", layout(b), f"[R, O] contiguous with O {outputs}")
    if sum(widths) != outputs or min(widths) < 1:
        refuse("widths", widths, f"1 or more each, together {outputs}")
    tensors = {"y": y, "b": b}
    if h is not None:
        tensors["h"] = h
        shape = (tables.blocks.max_items, len(widths), TILE, BLOCK)
        if h.shape != shape or not h.is_contiguous() or h.dtype is not b.dtype:
            refuse("h", layout(h), f"{b.dtype} {shape} contiguous")
    if base_bias is not None:
        tensors["base_bias"] = base_bias
        if base_bias.shape != (outputs,) or not base_bias.is_contiguous():
            refuse("base_bias", layout(base_bias), f"({outputs},) contiguous")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            refuse(name, tensor.dtype, f"one of {DTYPES}")
        if tensor.device != y.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {y.device} as y")
    tables.check("y", y)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _expand_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    h_ptr,
    b_ptr,
    base_bias_ptr,
    block_starts_ptr,
    block_rows_ptr,
    block_weights_ptr,
    gain_starts_ptr,
    gain_rows_ptr,
    gain_weights_ptr,
    bias_starts_ptr,
    bias_rows_ptr,
    bias_weights_ptr,
    y_stride,
    num_tokens,
    outputs,
    WIDTHS: tl.constexpr,
    MEMBERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    SIDE: tl.constexpr = 16
    tile, block = tl.program_id(0), tl.program_id(1)
    first_block = tl.load(block_starts_ptr + tile)
    last_block = tl.load(block_starts_ptr + tile + 1)
    first_gain, last_gain = tl.load(gain_starts_ptr + tile), tl.load(gain_starts_ptr + tile + 1)
    first_bias, last_bias = tl.load(bias_starts_ptr + tile), tl.load(bias_starts_ptr + tile + 1)
    if h_ptr is None:
        last_block = first_block
    if (first_block == last_block) & (first_gain == last_gain) & (first_bias == last_bias):
        return
    member, begin, end = _member_columns(block, WIDTHS, MEMBERS, COLUMNS)
    columns = begin + tl.arange(0, COLUMNS)
    live = (columns < end) | EVEN
    side = tl.arange(0, SIDE)
    tokens = tile * SIDE + side
    y_at = y_ptr + tokens.to(tl.int64)[:, None] * y_stride + columns[None, :]
    y = tl.load(y_at, mask=(tokens < num_tokens)[:, None] & live[None, :], other=0.0)
    y = y.to(tl.float32)
    base = y
    if base_bias_ptr is not None:
        base -= tl.load(base_bias_ptr + columns, mask=live, other=0.0).to(tl.float32)[None, :]
    acc = tl.zeros([SIDE, COLUMNS], tl.float32)
    touched = tl.zeros([SIDE], tl.int32)

    for item in range(first_gain, last_gain):
        weights = tl.load(gain_weights_ptr + item * SIDE + side)
        row = tl.load(gain_rows_ptr + item).to(tl.int64)
        gain = tl.load(b_ptr + row * outputs + columns, mask=live, other=0.0).to(tl.float32)
        used = weights != 0
        acc += tl.where(used[:, None], weights[:, None] * gain[None, :] * base, 0.0)
        touched |= used.to(tl.int32)

    if h_ptr is not None:
        # Loads of weights would wait in each step: bits tell which of 32 items a token uses.
        GROUP: tl.constexpr = 32
        lanes = tl.arange(0, GROUP)
        h_at = h_ptr + member * (SIDE * SIDE) + side[:, None] * SIDE + side[None, :]
        b_at = b_ptr + side.to(tl.int64)[:, None] * outputs + columns[None, :]
        for group in range(first_block, last_block, GROUP):
            weights = tl.load(
                block_weights_ptr + (group + lanes)[:, None] * SIDE + side[None, :],
                mask=(group + lanes < last_block)[:, None],
                other=0.0,
            )
            users = tl.sum((weights != 0).to(tl.int32) << lanes[:, None], axis=0)
            touched |= users
            for item in range(group, tl.minimum(group + GROUP, last_block)):
                row = tl.load(block_rows_ptr + item).to(tl.int64)
                h = tl.load(h_at + item * (MEMBERS * SIDE * SIDE))
                if EVEN:
                    b = tl.load(b_at + row * outputs)
                else:
                    b = tl.load(b_at + row * outputs, mask=live[None, :], other=0.0)
                if WIDEN:
                    h, b = h.to(tl.float32), b.to(tl.float32)
                delta = tl.dot(h, b, input_precision="tf32x3")
                used = ((users >> (item - group)) & 1) != 0
                acc += tl.where(used[:, None], delta, 0.0)

    for item in range(first_bias, last_bias):
        weights = tl.load(bias_weights_ptr + item * SIDE + side)
        row = tl.load(bias_rows_ptr + item).to(tl.int64)
        bias = tl.load(b_ptr + row * outputs + columns, mask=live, other=0.0).to(tl.float32)
        used = weights != 0
        acc += tl.where(used[:, None], weights[:, None] * bias[None, :], 0.0)
        touched |= used.to(tl.int32)

    kept = (tokens < num_tokens) & (touched != 0)
    value = (y + acc).to(y_ptr.dtype.element_ty)
    tl.store(y_at, value, mask=kept[:, None] & live[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _member_columns(  # type: ignore[no-untyped-def]
    block, WIDTHS: tl.constexpr, MEMBERS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The member that a block of columns is of, the block's first column and the member's end."""
    member, begin, end = 0, block * COLUMNS, WIDTHS[0]
    blocks, edge = (WIDTHS[0] + COLUMNS - 1) // COLUMNS, WIDTHS[0]
    for number in tl.static_range(1, MEMBERS):
        later = block >= blocks
        member = tl.where(later, number, member)
        begin = tl.where(later, edge + (block - blocks) * COLUMNS, begin)
        end = tl.where(later, edge + WIDTHS[number], end)
        blocks += (WIDTHS[number] + COLUMNS - 1) // COLUMNS
        edge += WIDTHS[number]
    return member, begin, end
