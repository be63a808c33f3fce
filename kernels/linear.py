"""x @ weight.T + bias, and the layout in which it wants its weight.

Shapes: T tokens, I in, O out. On the CPU, oneDNN's blocked layout makes few-row products up to 1.8
times as fast as a plain matrix (docs/benchmarks). bf16 without hardware for it is widened for every
call beyond a few rows: emulated products are slower than that.
"""

from functools import cache

import torch
import torch.nn.functional as F

_EMULATED_ROWS = 2
_blocked_linear = torch.ops.mkldnn._linear_pointwise.default


@cache
def has_blocked_layout(device_type: str, dtype: torch.dtype) -> bool:
    """Whether `pack_weight` changes the layout: on the CPU, where oneDNN takes this dtype."""
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.float32:
        return True
    return dtype is torch.bfloat16 and _has_native_bf16()


@cache
def _has_native_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """weight [O, I] as `linear` wants it: a blocked copy, or the weight itself."""
    if not has_blocked_layout(weight.device.type, weight.dtype):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, I], weight [O, I] packed or plain, bias [O] or None, one floating dtype -> [T, O]."""
    if weight.is_mkldnn:
        y: torch.Tensor = _blocked_linear(x, weight, bias, "none", [], "")
        return y
    emulated = x.dtype is torch.bfloat16 and x.device.type == "cpu" and not _has_native_bf16()
    if emulated and x.shape[0] > _EMULATED_ROWS:
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
    return F.linear(x, weight, bias)
