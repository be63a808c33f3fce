"""The KV pool: what it takes of the plan, its page of padding, and zeroed pages."""

import pytest
import torch

from engine.config import DeviceConfig, MemoryConfig
from engine.device import Device
from engine.errors import CapacityError
from engine.memory.kv_pool import KVPool

HEADS, DIM, LAYERS, PAGE = 2, 8, 3, 4
PAGE_BYTES = 2 * LAYERS * HEADS * DIM * PAGE * 4


class Model:
    kv_shape = (HEADS, DIM, LAYERS)
    dtype = torch.float32


class Plan:
    def __init__(self, kv_bytes: int) -> None:
        self.kv_bytes = kv_bytes

    def render(self, kv_used_bytes: int, kv_what: str) -> str:
        return "the plan"


def make(kv_bytes: int, max_kv_tokens: int | None = None) -> KVPool:
    cfg = MemoryConfig(page_size=PAGE, max_kv_tokens=max_kv_tokens)
    return KVPool(cfg, Plan(kv_bytes), Model(), Device(DeviceConfig()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kv_bytes", "max_kv_tokens", "num_pages"),
    [
        (6 * PAGE_BYTES, None, 5),
        (6 * PAGE_BYTES - 1, None, 4),
        (6 * PAGE_BYTES, 9, 3),
        (6 * PAGE_BYTES, 999, 5),
        (2 * PAGE_BYTES, None, 1),
    ],
)
def test_pages_and_the_one_of_padding_stay_within_the_plan(
    kv_bytes: int, max_kv_tokens: int | None, num_pages: int
) -> None:
    pool = make(kv_bytes, max_kv_tokens)
    assert pool.num_pages == pool.null_page == num_pages
    assert pool.num_bytes == sum(layer.nbytes for layer in pool.layers) <= kv_bytes
    assert [layer.shape for layer in pool.layers] == [(2, num_pages + 1, HEADS, PAGE, DIM)] * LAYERS
    assert not any(layer.any() for layer in pool.layers)


def test_less_than_a_page_and_one_of_padding_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"a page of 4 tokens and one of padding.*the plan"):
        make(2 * PAGE_BYTES - 1)


def test_zero_clears_keys_and_values_of_these_pages_in_all_layers_and_no_others() -> None:
    pool = make(6 * PAGE_BYTES)
    for layer in pool.layers:
        layer.fill_(torch.nan)
    pool.zero([3, 1])
    for layer in pool.layers:
        assert (layer[:, [1, 3]] == 0).all()
        assert layer[:, [0, 2, 4, 5]].isnan().all()
