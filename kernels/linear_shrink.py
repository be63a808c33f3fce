"""Base product of a projection and the LoRA shrink of the same input, in Triton.

Shapes: T tokens, I in, O out, R rows of the pool, M members of a fused projection, P planes, S
splits of I in the shrink. Few tokens: one launch does both, some programs a block of outputs and a
part of I, the others the shrink's items, whose count they read on the device. More tokens: torch
multiplies and the shrink is a launch of its own. Planes and splits depend on shapes alone and are
added in their order, so no token's result depends on the others'. Knows nothing of who owns which
rows, and of what its consumer adds up.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import is_interpreted
from engine.kernels.lora_shrink import (
    ShrinkWorkspace,
    check_matrix,
    check_shrink,
    new_h,
    num_units,
    shrink,
    shrink_constants,
    shrink_items,
    shrink_pointers,
)
from engine.kernels.lora_tables import TILE, LoRATables

# Beyond so many tokens torch's product is the faster one.
MOST_TOKENS_OF_ONE_LAUNCH = 64
_MAX_PLANES = 8
_FEWEST_INPUTS_OF_A_PLANE = 512
# Programs for the shrink, each of which does as many units as it must.
_SHRINK_PROGRAMS_PER_SM = 1


@dataclass(frozen=True, slots=True)
class Projected:
    """A projection before its consumer adds it up.

    y [P, T, O]: planes of the base product without bias, to be summed in order in float32; float32
    or, if P is 1, the input's dtype. h [max_items, M, 16, 16] in the input's dtype, None if no
    adapter can be in use: by block item and member, token of the tile, row of the block; what lies
    beyond the items' count is not written.
    """

    y: torch.Tensor
    h: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Outputs of a program and inputs of a loop step, planes at most, warps of a program, depth of
    the load pipeline; whether the shrink's programs are started before the base product's.
    """

    outputs: int
    inputs: int
    planes: int
    warps: int
    stages: int
    shrink_first: bool = False


# By whether blocks of 128 outputs alone fill the card, and tokens padded to a power of 2: outputs,
# bytes of inputs of a loop step, warps, stages, programs that a multiprocessor should have. More
# tokens take wider blocks, which read x less often, and fewer planes, which are written and read.
_BLOCKS = {
    (False, 16): (64, 256, 4, 3, 2),
    (False, 32): (64, 256, 4, 3, 2),
    (False, 64): (128, 128, 4, 4, 1),
    (True, 16): (128, 128, 4, 3, 2),
    (True, 32): (128, 128, 4, 3, 2),
    (True, 64): (128, 128, 4, 3, 2),
}
_DEFAULT_BLOCK = (128, 128, 4, 3, 1)


def linear_tile(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, num_sms: int
) -> LinearTile:
    """The tile that `linear_shrink` takes for few tokens if it is not told one."""
    wide = outputs >= 128 * num_sms
    block = _BLOCKS.get((wide, _padded(tokens)), _DEFAULT_BLOCK)
    own_outputs, step_bytes, warps, stages, per_sm = block
    fill = num_sms * per_sm // triton.cdiv(outputs, own_outputs)
    planes = max(1, min(fill, _MAX_PLANES, inputs // _FEWEST_INPUTS_OF_A_PLANE))
    return LinearTile(own_outputs, step_bytes // dtype.itemsize, planes, warps, stages)


def linear_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    tables: LoRATables | None,
    workspace: ShrinkWorkspace,
    *,
    tile: LinearTile | None = None,
    early: bool = False,
) -> Projected:
    """x [T, I], weight [O, I], a [R, M, I] (None, or tables None: no shrink), one floating dtype.

    y is float32 up to MOST_TOKENS_OF_ONE_LAUNCH tokens or if told a tile, else one plane in x's
    dtype. h is what `shrink` gives. early: start while the kernel before ends and fetch weights
    until its results are there (compute capability 9 and later, one launch only); weight must then
    be older than that kernel. Grids depend on shapes alone; ValueError on shapes, dtypes and
    devices that do not fit.
    """
    check_matrix(x, "weight", weight, "[O, I]")
    outputs, inputs = weight.shape
    num_tokens = x.shape[0]
    if tile is None and num_tokens > MOST_TOKENS_OF_ONE_LAUNCH:
        h = None if a is None or tables is None else shrink(x, a, tables, workspace)
        return Projected(torch.mm(x, weight.t())[None], h)
    tile = tile or linear_tile(num_tokens, outputs, inputs, x.dtype, workspace.num_sms)
    plane_inputs = triton.cdiv(triton.cdiv(inputs, tile.inputs), tile.planes) * tile.inputs
    planes, blocks = triton.cdiv(inputs, plane_inputs), triton.cdiv(outputs, tile.outputs)
    y = torch.empty((planes, num_tokens, outputs), dtype=torch.float32, device=x.device)
    h, programs = None, 0
    pointers: tuple[torch.Tensor | None, ...] = (None,) * 8
    if a is not None and tables is not None:
        check_shrink(x, a, tables, workspace)
        h = new_h(x, a, tables)
        programs = min(num_units(h, x), workspace.num_sms * _SHRINK_PROGRAMS_PER_SM)
        pointers = shrink_pointers(a, h, tables, workspace)
    early = early and not is_interpreted()
    _linear_kernel[(blocks * planes + programs,)](
        x,
        weight,
        y,
        *pointers,
        x.stride(0),
        num_tokens,
        outputs,
        inputs,
        plane_inputs,
        blocks,
        blocks * planes,
        programs,
        **shrink_constants(x, a),
        TOKENS=_padded(num_tokens),
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        EVEN=outputs % tile.outputs == 0 and inputs % tile.inputs == 0,
        SHRINKS=programs > 0,
        SHRINK_FIRST=tile.shrink_first,
        EARLY=early,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=early,
    )
    return Projected(y, h)


def _padded(tokens: int) -> int:
    return max(TILE, int(triton.next_power_of_2(tokens)))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tokens", "blocks", "products", "programs"],
    do_not_specialize_on_alignment=["count_ptr"],
)
def _linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    y_ptr,
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
    outputs,
    inputs,
    plane_inputs,
    blocks,
    products,
    programs,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    SHRINKS: tl.constexpr,
    SHRINK_FIRST: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    STEP: tl.constexpr,
    STEP_EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs 0..products multiply, `programs` more shrink, or these come first."""
    number = tl.program_id(0)
    shrinker = number - products
    if SHRINK_FIRST:
        shrinker = tl.where(number < programs, number, -1)
        number -= programs
    if EARLY:
        if shrinker < 0:
            _prefetch(weight_ptr, number, blocks, outputs, inputs, plane_inputs, OUTPUTS)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if shrinker < 0:
        _multiply(
            x_ptr,
            weight_ptr,
            y_ptr,
            number % blocks,
            number // blocks,
            x_stride,
            num_tokens,
            outputs,
            inputs,
            plane_inputs,
            TOKENS,
            OUTPUTS,
            INPUTS,
            EVEN,
            WIDEN,
        )
    elif SHRINKS:
        shrink_items(
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
            0 if SHRINK_FIRST else products,
            programs,
            MEMBERS,
            SPLITS,
            SPLIT_INPUTS,
            STEP,
            STEP_EVEN,
            WIDEN,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(  # type: ignore[no-untyped-def]
    weight_ptr, number, blocks, outputs, inputs, plane_inputs, OUTPUTS: tl.constexpr
):
    """Fetch the first 512 bytes of the program's rows of weight into the L2 cache."""
    LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    rows = tl.minimum(number % blocks * OUTPUTS + tl.arange(0, OUTPUTS), outputs - 1)
    columns = number // blocks * plane_inputs + tl.arange(0, 4) * LINE
    columns = tl.minimum(columns, inputs - 1)
    lines = weight_ptr + rows.to(tl.int64)[:, None] * inputs + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    y_ptr,
    block,
    plane,
    x_stride,
    num_tokens,
    outputs,
    inputs,
    plane_inputs,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A block of outputs of one plane. Outputs are the rows of the product, so that tensor cores
    take the weights, which are many, from shared memory.
    """
    rows = block * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens, lanes = tl.arange(0, TOKENS), tl.arange(0, INPUTS)
    weight_at = weight_ptr + rows.to(tl.int64)[:, None] * inputs + lanes[None, :]
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * x_stride + lanes[:, None]
    in_rows, in_tokens = (rows < outputs)[:, None], (tokens < num_tokens)[None, :]
    start = plane * plane_inputs
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for begin in range(start, tl.minimum(start + plane_inputs, inputs), INPUTS):
        if EVEN:
            w = tl.load(weight_at + begin)
            x = tl.load(x_at + begin, mask=in_tokens, other=0.0)
        else:
            live = begin + lanes < inputs
            w = tl.load(weight_at + begin, mask=in_rows & live[None, :], other=0.0)
            x = tl.load(x_at + begin, mask=in_tokens & live[:, None], other=0.0)
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="tf32x3")
    y_at = y_ptr + (plane * num_tokens + tokens).to(tl.int64)[None, :] * outputs + rows[:, None]
    tl.store(y_at, acc, mask=in_rows & in_tokens)
