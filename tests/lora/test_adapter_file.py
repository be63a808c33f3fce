"""Reading adapters: PEFT's deltas for random adapters, every kind of fault refused by name."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from tests_support import random_adapter

from engine.errors import AdapterError
from engine.lora.adapter import LoRATarget
from engine.lora.adapter_file import adapter_from_tensors, read_adapter
from engine.lora.peft_config import parse_config

WIDTHS = {
    "self_attn.q_proj": (16, 16), "self_attn.k_proj": (16, 8), "self_attn.v_proj": (16, 8),
    "self_attn.o_proj": (16, 16), "mlp.gate_proj": (16, 24), "mlp.up_proj": (16, 24),
    "mlp.down_proj": (24, 16),
}  # fmt: skip
TARGETS = {
    f"model.layers.{layer}.{name}": LoRATarget(f"model.layers.{layer}.{name}", *width)
    for layer in range(3)
    for name, width in WIDTHS.items()
}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
Q = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{Q}"


def tensors_of(*modules: str, rank: int = 4) -> dict[str, torch.Tensor]:
    widths = {name: (TARGETS[name].in_features, TARGETS[name].out_features) for name in modules}
    return random_adapter(widths, rank, seed=1)[0]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ranks_scalings_and_names_follow_peft(data: st.DataObject) -> None:
    """Random subsets, patterns, rsLoRA, name variants and dtypes; rules computed with PEFT's
    matching.
    """
    modules = data.draw(st.lists(st.sampled_from(sorted(TARGETS)), min_size=1, unique=True))
    keys = [
        "q_proj",
        "layers.1.self_attn.q_proj",
        "down_proj",
        ".*mlp.*",
        "model.layers.2.mlp.up_proj",
    ]
    ranks = data.draw(st.dictionaries(st.sampled_from(keys), st.integers(1, 9), max_size=3))
    alphas = data.draw(st.dictionaries(st.sampled_from(keys), st.integers(1, 40), max_size=3))
    r, alpha = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 64))
    rslora = data.draw(st.booleans())
    prefix = data.draw(
        st.sampled_from(["base_model.model.", "", "base_model.model.language_model."])
    )
    infix = data.draw(st.sampled_from(["", ".default"]))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
    )
    tensors, expected = {}, {}
    for name in modules:
        rank = ranks.get(get_pattern_key(list(ranks), name), r)
        own_alpha = alphas.get(get_pattern_key(list(alphas), name), alpha)
        a = torch.randn(rank, TARGETS[name].in_features).to(dtype)
        b = torch.randn(TARGETS[name].out_features, rank).to(dtype)
        tensors[f"{prefix}{name}.lora_A{infix}.weight"] = a
        tensors[f"{prefix}{name}.lora_B{infix}.weight"] = b
        expected[name] = own_alpha / (rank**0.5 if rslora else rank) * b.float() @ a.float()
    config = CONFIG | {
        "r": r, "lora_alpha": alpha, "use_rslora": rslora,
        "rank_pattern": ranks, "alpha_pattern": alphas,
        "a_field_of_the_future": data.draw(st.sampled_from([None, False, {}, []])),
    }  # fmt: skip
    adapter = adapter_from_tensors(tensors, config, TARGETS)
    assert adapter.num_pairs_read == adapter.num_pairs_applied == len(modules)
    assert set(adapter.pairs) == set(modules)
    for name, pair in adapter.pairs.items():
        torch.testing.assert_close(pair.scaling * pair.b.float() @ pair.a.float(), expected[name])


def test_fused_pairs_share_a_and_cut_b() -> None:
    a, b = torch.randn(4, 16), torch.randn(32, 4)
    stem = "base_model.model.model.layers.1.self_attn.qkv_proj"
    tensors = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    adapter = adapter_from_tensors(tensors, CONFIG, TARGETS)
    assert (adapter.num_pairs_read, len(adapter.pairs)) == (1, 3)
    parts = [adapter.pairs[f"model.layers.1.self_attn.{name}_proj"] for name in "qkv"]
    assert torch.equal(torch.cat([part.b for part in parts]), b)
    assert all(torch.equal(part.a, a) for part in parts)


def drop(tensors: dict[str, torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if side not in key}


def with_value(value: float) -> dict[str, torch.Tensor]:
    tensors = tensors_of(Q)
    next(iter(tensors.values()))[0, 0] = value
    return tensors


TENSOR_FAULTS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "nothing": ({}, "the weights hold no tensor"),
    "no B": (drop(tensors_of(Q), "lora_B"), f"{Q} has no lora_B"),
    "no A": (drop(tensors_of(Q), "lora_A"), f"{Q} has no lora_A"),
    "nan": (with_value(torch.nan), "numbers that are not finite"),
    "rank": (tensors_of(Q, rank=5), f"{Q} has rank 5, the config says 4"),
    "integers": ({k: t.int() for k, t in tensors_of(Q).items()}, "dtype torch.int32, expected"),
    "vision": (
        {f"vision_tower.{k}": t for k, t in tensors_of(Q).items()}, "the base has no such module"
    ),
    "dora": (tensors_of(Q) | {f"{KEY}.lora_magnitude_vector": torch.ones(16)}, "use_dora"),
    "head": (tensors_of(Q) | {"base_model.model.lm_head.weight": torch.ones(2, 2)}, "lm_head"),
    "bias": (tensors_of(Q) | {f"{KEY}.lora_B.bias": torch.ones(16)}, "lora_bias"),
    "two adapters": (
        {f"{Q}.lora_A.x.weight": torch.ones(4, 16), f"{Q}.lora_B.y.weight": torch.ones(16, 4)},
        "keys of several adapters",
    ),
    "sparse": ({k: t.to_sparse() for k, t in tensors_of(Q).items()}, "sparse or without data"),
    "meta": ({k: t.to("meta") for k, t in tensors_of(Q).items()}, "sparse or without data"),
    "scales": (
        {k: t.to(torch.float8_e8m0fnu) for k, t in tensors_of(Q).items()}, "dtype torch.float8_e8"
    ),
    "twice": (
        tensors_of(Q) | {f"{KEY}.lora_A.default.weight": torch.ones(4, 16)}, "lora_A is given twice"
    ),
    "two spellings": (
        tensors_of(Q) | {f"{Q}.lora_A.default.weight": torch.ones(4, 16)}, "is spelt in two ways"
    ),
    "width": (
        tensors_of(Q) | {f"base_model.model.{Q}.lora_B.weight": torch.ones(15, 4)},
        r"lora_A is [4, 16] and lora_B [15, 4], expected [rank, 16] and [16, rank]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", sorted(TENSOR_FAULTS))
def test_faulty_tensors(fault: str) -> None:
    tensors, message = TENSOR_FAULTS[fault]
    with pytest.raises(AdapterError) as refused:
        adapter_from_tensors(tensors, CONFIG, TARGETS)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", 1), ("bias", "some"), ("lora_bias", "yes"), ("fan_in_fan_out", True),
        ("modules_to_save", ["norm"]), ("layer_replication", [[0, 2]]), ("use_qalora", True),
        ("modules_to_save", "lm_head"), ("ensure_weight_tying", True),
        ("trainable_token_indices", [1]), ("alora_invocation_tokens", [1, 2]),
        ("use_bdlora", {"x": 1}),
        ("target_parameters", ["experts"]), ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("megatron_config", {"a": 1}), ("kasa_config", {"a": 1}), ("future_math", 3),
        ("peft_type", "IA3"), ("r", 0), ("lora_alpha", "x"), ("rank_pattern", {"q_proj": "x"}),
        ("alpha_pattern", {"(": 1}), ("alpha_pattern", {"(?i)q_proj": 1}),
        ("rank_pattern", {"q_proj": 4.5}), ("rank_pattern", {"q_proj": 0}),
        ("use_rslora", "false"), ("lora_alpha", 10**400), ("lora_alpha", float("nan")),
    ],
)  # fmt: skip
def test_fields_that_change_the_mathematics_are_refused_by_name(field: str, value: Any) -> None:
    parsed, reasons = parse_config(CONFIG | {field: value})
    assert parsed is None
    assert any(field in reason for reason in reasons)


@pytest.mark.parametrize("change", ["shorter", "longer", "missing", "twice", "compressed"])
def test_records_of_an_archive_are_as_long_as_its_pickle_says(change: str, tmp_path: Path) -> None:
    """torch would hand out the memory behind a record that is too short."""
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "adapter_model.bin"
    torch.save(tensors_of(Q), path)
    assert read_adapter(tmp_path, TARGETS).num_pairs_applied == 1
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in records if name.endswith("/data/0"))
    own = records.pop(name)
    kind = zipfile.ZIP_DEFLATED if change == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for other, record in records.items():
            archive.writestr(other, record)
        copies = {"shorter": [own[:-4]], "longer": [own + own], "missing": [], "twice": [own] * 2}
        for copy in copies.get(change, [own]):
            archive.writestr(name, copy)
    with pytest.raises(AdapterError, match="is no plain state dict"):
        read_adapter(tmp_path, TARGETS)


def test_a_config_with_a_field_twice_is_refused(tmp_path: Path) -> None:
    save_file(tensors_of(Q), tmp_path / "adapter_model.safetensors")
    text = json.dumps(CONFIG)
    (tmp_path / "adapter_config.json").write_text(text.replace('"r": 4', '"r": 4, "r": 8'))
    with pytest.raises(AdapterError, match="r given twice"):
        read_adapter(tmp_path, TARGETS)


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ({"((.|.)+)+[!?]": 4}, "write it plainly"),
        ({f"q_proj{index}": 4 for index in range(3000)}, "at most 2000"),
    ],
)
def test_patterns_that_never_end_or_are_too_many_are_refused(
    pattern: dict[str, int], word: str
) -> None:
    with pytest.raises(AdapterError, match=word):
        adapter_from_tensors(tensors_of(Q), CONFIG | {"rank_pattern": pattern}, TARGETS)


def test_all_reasons_come_at_once() -> None:
    tensors = drop(tensors_of(Q), "lora_B") | {"odd.key": torch.ones(1)}
    with pytest.raises(AdapterError) as refused:
        adapter_from_tensors(tensors, CONFIG | {"use_qalora": True, "bias": "x"}, TARGETS)
    for reason in ("use_qalora=True", "bias is 'x'", "odd.key", "has no lora_B"):
        assert reason in str(refused.value)


def test_many_faults_of_a_kind_are_counted() -> None:
    tensors = tensors_of(*TARGETS, rank=5)
    with pytest.raises(AdapterError) as refused:
        adapter_from_tensors(tensors, CONFIG, TARGETS)
    assert str(refused.value).count("has rank 5, the config says 4") == 3
    assert f"and {len(TARGETS) - 3} more disagreements with the config" in str(refused.value)


def test_patterns_match_the_names_in_the_file_and_in_the_base() -> None:
    """A wrapped model's patterns hold its own full names, a bare file's those of the base."""
    inner = "model.language_model.layers.0.self_attn.q_proj"
    for module, key in [(inner, inner), (inner, f"^{inner}"), (Q.removeprefix("model."), Q)]:
        named = {
            f"base_model.model.{name}".replace(Q, module): tensor
            for name, tensor in (
                (k.removeprefix("base_model.model."), t) for k, t in tensors_of(Q).items()
            )
        }
        config = CONFIG | {"alpha_pattern": {key: 80}}
        assert adapter_from_tensors(named, config, TARGETS).pairs[Q].scaling == 20


def test_an_adapter_owns_its_tensors(directory: Path) -> None:
    """Neither a file overwritten in place nor a caller that trains on changes a loaded adapter."""
    weights = directory / "adapter_model.safetensors"
    adapter = read_adapter(directory, TARGETS)
    kept = adapter.pairs[Q].b.clone()
    with weights.open("r+b") as file:
        file.write(b"\xff" * weights.stat().st_size)
    assert torch.equal(adapter.pairs[Q].b, kept)
    with weights.open("r+b") as file:
        file.truncate(10)
    assert torch.equal(adapter.pairs[Q].b, kept)
    tensors = {key: torch.nn.Parameter(tensor) for key, tensor in tensors_of(Q).items()}
    adapter = adapter_from_tensors(tensors, CONFIG, TARGETS)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    assert torch.equal(adapter.pairs[Q].b, kept)
    assert not adapter.pairs[Q].b.requires_grad


class Bomb:
    """Unpickling this would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A good adapter on disk."""
    save_file(tensors_of(Q), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_the_three_file_forms_read_the_same(directory: Path) -> None:
    expected = read_adapter(directory, TARGETS).pairs[Q]
    weights = directory / "adapter_model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    torch.save(tensors, directory / "adapter_model.bin")
    assert torch.equal(read_adapter(directory, TARGETS).pairs[Q].b, expected.b)
    for shard, key in enumerate(sorted(tensors)):
        save_file({key: tensors[key]}, directory / f"part{shard}.safetensors")
    shards = {key: f"part{shard}.safetensors" for shard, key in enumerate(sorted(tensors))}
    index = directory / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert torch.equal(read_adapter(directory, TARGETS).pairs[Q].b, expected.b)
    index.write_text(json.dumps({"weight_map": {key: "../x.safetensors" for key in tensors}}))
    with pytest.raises(AdapterError, match="outside its directory"):
        read_adapter(directory, TARGETS)


@pytest.mark.parametrize("weight_map", [None, "x", ["x"], {"a": None}, {"a": ["x"]}])
def test_a_broken_index_is_refused(directory: Path, weight_map: Any) -> None:
    (directory / "adapter_model.safetensors").unlink()
    index = directory / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(AdapterError, match="has no weight_map"):
        read_adapter(directory, TARGETS)


def test_a_tensor_in_two_shards_is_refused(directory: Path) -> None:
    weights = directory / "adapter_model.safetensors"
    key, other = sorted(load_file(weights))
    weights.rename(directory / "one.safetensors")
    save_file({other: torch.ones(16, 4)}, directory / "two.safetensors")
    index = {"weight_map": {key: "one.safetensors", other: "two.safetensors"}}
    (directory / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AdapterError, match=r"one\.safetensors: holds .*lora_B"):
        read_adapter(directory, TARGETS)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("zipped", [True, False])
def test_broken_pickles_are_refused(
    tmp_path_factory: pytest.TempPathFactory, zipped: bool, data: st.DataObject
) -> None:
    """Whatever torch raises on a damaged file, and on keys that are no names, is one refusal."""
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG))
    path = directory / "adapter_model.bin"
    torch.save(tensors_of(Q) | {1: torch.ones(1)}, path, _use_new_zipfile_serialization=zipped)
    raw = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, min(len(raw), 1000) - 1), max_size=3)):
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    with pytest.raises(AdapterError, match=r"adapter_model\.bin"):
        read_adapter(directory, TARGETS)


def test_a_pickle_with_code_is_refused_and_does_not_run(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()
    trace = directory / "ran"
    (directory / "adapter_model.bin").write_bytes(pickle.dumps({"x": Bomb(trace)}))
    with pytest.raises(AdapterError, match=r"adapter_model\.bin: is no plain state dict"):
        read_adapter(directory, TARGETS)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", None, r"adapter_config\.json: cannot be read"),
        ("adapter_config.json", b"{", r"adapter_config\.json: is not JSON"),
        ("adapter_config.json", b"[" * 200_000, r"adapter_config\.json: is not JSON"),
        ("adapter_config.json", b"[]", "holds a list, expected an object"),
        ("adapter_config.json", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("adapter_model.safetensors", None, "no weights; expected adapter_model.safetensors"),
        (
            "adapter_model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\n",
            "Git LFS pointer",
        ),
        ("adapter_model.safetensors", b"\x10\0\0\0", r"adapter_model\.safetensors: cannot be read"),
    ],
)
def test_broken_files(directory: Path, name: str, content: bytes | None, message: str) -> None:
    path = directory / name
    path.unlink()
    if name == "adapter_config.json":  # a second broken file is reported too
        (directory / "adapter_model.safetensors").write_bytes(b"x")
        message += r"(.|\n)*adapter_model\.safetensors: cannot be read"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AdapterError, match=message):
        read_adapter(directory, TARGETS)
