"""Cases of the small kernels between products: norms and SwiGLU's elementwise part."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from engine.bench.attention_cases import Target
from engine.bench.kernel_case import Case, Prepared, deviation
from engine.bench.shapes import ITEM_BYTES, ModelShape
from engine.kernels import norm as norm_reference
from engine.kernels import silu_mul as silu_reference
from engine.kernels.fused_norm import add_rms_norm, rms_norm
from engine.kernels.fused_silu_mul import silu_mul

_EPS = 1e-5


def elementwise_cases(shape: ModelShape, tokens: Sequence[int], target: Target) -> Iterator[Case]:
    kernels = {"rms_norm": _norm, "add_rms_norm": _add_norm, "silu_mul": _silu_mul}
    for name, make in kernels.items():
        for count in tokens:
            yield Case(name, f"{count} tokens", partial(make, shape, count, target))


def _norm(shape: ModelShape, tokens: int, target: Target) -> Prepared:
    x, weight = target.random(tokens, shape.hidden), target.random(shape.hidden)

    def call() -> torch.Tensor:
        return rms_norm(x, weight, _EPS)

    def peer() -> torch.Tensor:
        return F.rms_norm(x, (shape.hidden,), weight, _EPS)

    def off_by() -> float:
        return deviation([call()], [norm_reference.rms_norm(x.float(), weight.float(), _EPS)])

    num_bytes = ITEM_BYTES * (2 * x.numel() + weight.numel())
    return Prepared(call, off_by, num_bytes, 4 * x.numel(), peer, "rms_norm")


def _add_norm(shape: ModelShape, tokens: int, target: Target) -> Prepared:
    x, weight = target.random(tokens, shape.hidden), target.random(shape.hidden)
    residual = target.random(tokens, shape.hidden)

    def call() -> torch.Tensor:
        return add_rms_norm(x, residual, weight, _EPS)

    def peer() -> torch.Tensor:
        return norm_reference.add_rms_norm(x, residual, weight, _EPS)

    def off_by() -> float:
        wanted = residual.clone()
        expected = norm_reference.add_rms_norm(x, wanted, weight, _EPS)
        return deviation([call(), residual], [expected, wanted])

    num_bytes = ITEM_BYTES * (4 * x.numel() + weight.numel())
    return Prepared(call, off_by, num_bytes, 5 * x.numel(), peer, "add_, rms_norm")


def _silu_mul(shape: ModelShape, tokens: int, target: Target) -> Prepared:
    gate_up = target.random(tokens, 2 * shape.ffn)

    def call() -> torch.Tensor:
        return silu_mul(gate_up)

    def peer() -> torch.Tensor:
        return silu_reference.silu_mul(gate_up)

    def off_by() -> float:
        return deviation([call()], [silu_reference.silu_mul(gate_up.float())])

    num_bytes = ITEM_BYTES * (gate_up.numel() * 3 // 2)
    return Prepared(call, off_by, num_bytes, 5 * gate_up.numel() // 2, peer, "silu, mul_")
