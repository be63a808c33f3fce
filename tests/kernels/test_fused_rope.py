"""Norm, rope and store in one launch: what norm.py, rope.py and write_kv give one after another."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine.kernels import fused_reference as reference
from engine.kernels.fused_rope import rope_write_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EPS = 1e-6


@dataclass(frozen=True)
class Given:
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    num_heads: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    def arguments(self) -> dict[str, Any]:
        return {**vars(self), "eps": EPS}


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def some_slots(tokens: int, total: int, dtype: torch.dtype) -> torch.Tensor:
    """Different places, every fifth token padded."""
    slots = torch.randperm(total)[:tokens].to(dtype)
    slots[4::5] = -1
    return slots.to(DEVICE)


def make(
    tokens: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    page_size: int = 4,
    norm: bool = False,
    dtype: torch.dtype = torch.float32,
    slot_dtype: torch.dtype = torch.int64,
) -> Given:
    torch.manual_seed(tokens + heads + head_dim)
    rotary_dim = rotary_dim or head_dim
    pages = tokens // page_size + 2
    angles = torch.rand(tokens, rotary_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    return Given(
        random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
        torch.cat((cos, cos), 1).to(DEVICE, dtype),
        torch.cat((-sin, sin), 1).to(DEVICE, dtype),
        random(2, pages, kv_heads, page_size, head_dim, dtype=dtype),
        some_slots(tokens, pages * page_size, slot_dtype),
        heads,
        random(head_dim, dtype=dtype) if norm else None,
        random(head_dim, dtype=dtype) if norm else None,
    )


def check(given: Given) -> None:
    own = replace(given, cache=given.cache.clone())
    expected = reference.rope_write_kv(**own.arguments())
    qkv = given.qkv.clone()
    found = rope_write_kv(**given.arguments())
    assert found.is_contiguous() and torch.equal(given.qkv, qkv)
    assert_same(found, given.cache, expected, own.cache)


def assert_same(
    q: torch.Tensor, cache: torch.Tensor, expected_q: torch.Tensor, expected_cache: torch.Tensor
) -> None:
    """q and keys up to rounding, values to the bit."""
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(q, expected_q, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(cache[0], expected_cache[0], atol=tolerance, rtol=tolerance)
    assert torch.equal(cache[1], expected_cache[1])


CASES = [  # tokens, heads, kv_heads, head_dim, rotary_dim
    (1, 4, 2, 64, 64),
    (7, 2, 1, 80, 80),
    (6, 3, 3, 96, 48),
    (5, 8, 2, 128, 128),
    (5, 2, 1, 256, 64),
    (6, 14, 2, 64, 16),
]


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"), CASES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_as_reference(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norm: bool,
    dtype: torch.dtype,
) -> None:
    check(
        make(
            tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            norm=norm,
            dtype=dtype,
            slot_dtype=torch.int32 if norm else torch.int64,
        )
    )


def test_strided_views() -> None:
    """Rows of a wider product, angles seen through [T, 1, P], a layer's half of a cache."""
    given = make(6, heads=2, kv_heads=1, head_dim=64, norm=True)
    wide = torch.cat((given.qkv, given.qkv), 1)
    wide_angles = torch.stack((given.cos, given.sin), 1)
    layers = torch.stack((given.cache, given.cache), 1)
    found = rope_write_kv(
        **replace(
            given,
            qkv=wide[:, given.qkv.shape[1] :],
            cos=wide_angles[:, 0],
            sin=wide_angles[:, 1:][:, 0],
            cache=layers[:, 1],
        ).arguments()
    )
    assert torch.equal(layers[:, 0], given.cache)
    expected = reference.rope_write_kv(**given.arguments())
    assert_same(found, layers[:, 1], expected, given.cache)


def test_padded_tokens() -> None:
    """Neither their numbers nor their angles reach anything, and no slot of theirs is written."""
    given = make(5, heads=2, kv_heads=1, head_dim=64, norm=True)
    given.slots.fill_(-1)
    for tensor in (given.qkv, given.cos, given.sin):
        tensor.fill_(float("nan"))
    before = given.cache.clone()
    q = rope_write_kv(**given.arguments())
    assert torch.equal(q, torch.zeros_like(q)) and torch.equal(given.cache, before)


def test_where_tokens_are_stored() -> None:
    given = make(3, heads=1, kv_heads=2, head_dim=64, page_size=4)
    slots, head_dim = [6, -1, 0], 64
    given.slots.copy_(torch.tensor(slots))
    given.cache.zero_()
    rope_write_kv(**given.arguments())
    values = given.qkv[:, 3 * head_dim :].view(3, 2, head_dim)
    assert torch.equal(given.cache[1, 1, :, 2], values[0])
    assert torch.equal(given.cache[1, 0, :, 0], values[2])
    written = given.cache.abs().sum((2, 4)).nonzero().tolist()
    assert written == [[0, 0, 0], [0, 1, 2], [1, 0, 0], [1, 1, 2]]


def test_no_tokens() -> None:
    assert rope_write_kv(**make(0, heads=2, kv_heads=1, head_dim=64).arguments()).shape == (
        0,
        2,
        64,
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"qkv": torch.zeros(3, 255)}, r"qkv is .*\(3, 255\).*\[T, 256\]"),
    ({"qkv": torch.zeros(3, 256, dtype=torch.float64)}, "qkv is torch.float64"),
    ({"qkv": torch.zeros(256, 3).t()}, "qkv is"),
    ({"num_heads": 0}, "qkv is"),
    ({"cos": torch.zeros(3, 1, 64)}, r"cos is .*\[3, P\]"),
    ({"sin": torch.zeros(3, 32)}, "sin is"),
    ({"sin": torch.zeros(3, 64, dtype=torch.float16)}, "sin is"),
    ({"cos": torch.zeros(3, 66), "sin": torch.zeros(3, 66)}, "rotary dim is 66"),
    ({"cos": torch.zeros(3, 7), "sin": torch.zeros(3, 7)}, "rotary dim is 7"),
    ({"cache": torch.zeros(2, 2, 1, 4, 64, dtype=torch.float16)}, "cache is"),
    ({"cache": torch.zeros(2, 2, 1, 64, 4).transpose(3, 4)}, "cache is .*contiguous"),
    ({"cache": torch.zeros(2, 2, 1, 4, 63)}, "cache is .*D one of"),
    ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots is .*\[3\]"),
    ({"slots": torch.zeros(3)}, "slots is"),
    ({"slots": torch.zeros(6, dtype=torch.int64)[::2]}, "slots is .*contiguous"),
    ({"slots": torch.zeros(3, dtype=torch.int64, device="meta")}, "slots is on meta"),
    ({"q_norm": torch.zeros(64)}, "q_norm or k_norm is None"),
    ({"q_norm": torch.zeros(64), "k_norm": torch.zeros(32)}, "k_norm is"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    given = make(3, heads=2, kv_heads=1, head_dim=64).arguments()
    for name, value in change.items():
        moved = isinstance(value, torch.Tensor) and not value.is_meta
        given[name] = value.to(DEVICE) if moved else value
    with pytest.raises(ValueError, match=message):
        rope_write_kv(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 4096])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_shapes(tokens: int, norm: bool, dtype: torch.dtype) -> None:
    check(make(tokens, heads=32, kv_heads=8, head_dim=128, page_size=16, norm=norm, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("rotary", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_real_head_dims(head_dim: int, rotary: float, slot_dtype: torch.dtype) -> None:
    check(
        make(
            100,
            heads=14,
            kv_heads=2,
            head_dim=head_dim,
            rotary_dim=int(head_dim * rotary),
            page_size=16,
            norm=True,
            dtype=torch.bfloat16,
            slot_dtype=slot_dtype,
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64])
def test_in_a_graph(tokens: int) -> None:
    """One captured graph, replayed with other slots, padded ones among them."""
    given = make(
        tokens, heads=32, kv_heads=8, head_dim=128, page_size=16, norm=True, dtype=torch.bfloat16
    )
    rope_write_kv(**given.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rope_write_kv(**given.arguments())
    for seed in range(3):
        torch.manual_seed(seed)
        given.slots.copy_(some_slots(tokens, (tokens // 16 + 2) * 16, torch.int64))
        given.qkv.copy_(random(*given.qkv.shape, dtype=torch.bfloat16))
        own = replace(given, cache=given.cache.clone())
        expected = reference.rope_write_kv(**own.arguments())
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, given.cache, expected, own.cache)
