"""What all wrappers of Triton kernels share: the dtypes they take, refusals in one form, whether
Triton interprets.
"""

from typing import NoReturn

import torch
import triton  # type: ignore[import-untyped]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse(name: str, found: object, expected: str) -> NoReturn:
    raise ValueError(f"{name} is {found}, expected {expected}")


def layout(tensor: torch.Tensor) -> str:
    """A tensor's dtype, shape and strides, for a refusal."""
    return f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}"


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, whose dot reads bfloat16 as integers."""
    return bool(triton.knobs.runtime.interpret)
