"""Keys of patterns against `re`, which PEFT uses."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import AdapterError
from engine.lora.name_patterns import MAX_KEY_CHARS, NamePatterns, pattern_fault

PARTS = ["layers", "1", "11", "self_attn", "q_proj", "k_proj", "qXproj", "mlp"]
NAMES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(".".join)
KEYS = st.one_of(
    NAMES,
    NAMES.map(lambda name: name[1:]),
    NAMES.map(lambda name: name.replace("_", ".")),
    st.sampled_from([r".*\.1\..*", "(q|k)_proj", "^layers", "q_proj$", "", "|", "[qk]_pro{1}j"]),
)


@given(st.dictionaries(KEYS, st.integers(1, 64), max_size=6), st.lists(NAMES, max_size=2))
def test_the_first_key_counts_that_matches_as_in_peft(
    numbers: dict[str, int], names: list[str]
) -> None:
    def matches(key: str) -> bool:
        return any(re.match(rf"(.*\.)?({key})$", name) for name in names)

    expected = next((number for key, number in numbers.items() if matches(key)), 0)
    patterns = NamePatterns(numbers)
    assert patterns.number(names, 0) == expected
    assert patterns.unmatched([names]) == [key for key in numbers if not matches(key)]


def test_a_key_for_each_module_of_a_large_base_is_quick() -> None:
    names = [
        f"model.layers.{layer}.self_attn.{side}_proj" for layer in range(250) for side in "qkvo"
    ]
    patterns = NamePatterns({name: index for index, name in enumerate(reversed(names))})
    start = time.perf_counter()
    assert [patterns.number([name], -1) for name in names] == list(reversed(range(1000)))
    assert time.perf_counter() - start < 1


def test_all_keys_share_one_limit_of_time() -> None:
    patterns = NamePatterns({f"(.|.){{18}}!|x{index}": 1 for index in range(500)})
    start = time.perf_counter()
    with pytest.raises(AdapterError, match="write it plainly"):
        patterns.number(["model.layers.0.self_attn.q_proj"], 0)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ("q_proj", ""),
        ("layers.{1,2}", ""),
        (r"q\{e\}", ""),
        ("x" * (MAX_KEY_CHARS + 1), f"has {MAX_KEY_CHARS + 1} characters"),
        ("(a{100}){100}", "repeats a part"),
        ("(", "no regular expression"),
        ("(" * 900 + ")" * 900, "no regular expression"),
        ("(?:q){e<=1}", "ambiguous"),
        ("q{e}", "ambiguous"),
        ("[[:alpha:]]", "ambiguous"),
    ],
)
def test_keys_that_are_refused(key: str, fault: str) -> None:
    found = pattern_fault(key)
    assert fault in found and bool(fault) == bool(found)
