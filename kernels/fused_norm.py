"""RMSNorm, alone and behind a residual add, in Triton: norm.py in one launch.

Shapes: T tokens, H hidden. One program holds one row, statistics in float32. Rows may be strided
views of two or three dimensions; with more dimensions such a view is copied first.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import DTYPES

MAX_WIDTH = 16384
# Elements that a warp holds: one load of 16 bytes a thread in bfloat16.
_WARP_ELEMENTS, _MAX_WARPS = 256, 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] with H contiguous, weight [H] -> [..., H] in x's dtype, contiguous.

    One launch; ValueError on shapes, dtypes and devices that do not fit.
    """
    _check("x", x, weight)
    out = x.new_empty(x.shape)
    if x.numel():
        rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
        _launch(rows, rows, weight, out, eps, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x [T, H] to residual [T, H] in place, then return the norm of the sum as rounded [T, H],
    contiguous. Both have H contiguous.

    One launch; ValueError on shapes, dtypes and devices that do not fit.
    """
    _check("x", x, weight)
    _check("residual", residual, weight)
    if x.dim() != 2 or residual.shape != x.shape:
        found = f"{tuple(x.shape)} and {tuple(residual.shape)}"
        raise ValueError(f"x and residual are {found}, expected the same [T, H]")
    out = x.new_empty(x.shape)
    if x.numel():
        _launch(x[:, None], residual[:, None], weight, out, eps, add=True)
    return out


def _check(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.dim() != 1 or not 1 <= weight.shape[0] <= MAX_WIDTH or not weight.is_contiguous():
        found = f"{tuple(weight.shape)}, strides {weight.stride()}"
        raise ValueError(f"weight is {found}, expected [1..{MAX_WIDTH}] contiguous")
    width = weight.shape[0]
    if x.dim() < 1 or x.shape[-1] != width or (width > 1 and x.stride(-1) != 1):
        found = f"{tuple(x.shape)}, strides {x.stride()}"
        raise ValueError(f"{name} is {found}, expected [..., {width}], the last contiguous")
    if x.dtype not in DTYPES or weight.dtype is not x.dtype:
        found = f"{x.dtype} and {weight.dtype}"
        raise ValueError(f"{name} and weight are {found}, expected the same of {DTYPES}")
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}, expected {x.device} as {name}")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    """x and residual [A, B, H], out of A * B rows."""
    outer, inner, width = x.shape
    block = int(triton.next_power_of_2(width))
    _norm_kernel[(outer * inner,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        residual.stride(0),
        inner,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=add,
        num_warps=max(1, min(_MAX_WARPS, block // _WARP_ELEMENTS)),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_outer_stride,
    x_inner_stride,
    residual_stride,
    inner,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    live = lanes < WIDTH
    x_at = x_ptr + (row // inner) * x_outer_stride + (row % inner) * x_inner_stride
    x = tl.load(x_at + lanes, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=live, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual_ptr + row * residual_stride + lanes
        residual = tl.load(residual_at, mask=live, other=0.0).to(tl.float32)
        total = (residual + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, total, mask=live)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + lanes, out, mask=live)
