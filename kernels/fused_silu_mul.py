"""SwiGLU's elementwise part in Triton: silu(gate) * up in one launch, float32 inside.

Shapes: T tokens, F ffn width. A program makes one block of one token's outputs.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.inputs import DTYPES, refuse

_BLOCK, _WARPS = 1024, 4


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2F] (gate first) with 2F contiguous -> [T, F], contiguous.

    One launch; ValueError on shapes and dtypes that do not fit.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        found = f"{tuple(gate_up.shape)}, strides {gate_up.stride()}"
        raise ValueError(f"gate_up is {found}, expected [T, 2F] with 2F contiguous")
    if gate_up.dtype not in DTYPES:
        refuse("gate_up", gate_up.dtype, f"one of {DTYPES}")
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, width))
    if out.numel():
        _silu_mul_kernel[(tokens, triton.cdiv(width, _BLOCK))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = lanes < WIDTH
    gate_at = gate_up_ptr + token * stride + lanes
    gate = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=live, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * WIDTH + lanes, out.to(out_ptr.dtype.element_ty), mask=live)
