"""Loading a Hugging Face directory: complete, or refused with all faults at once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import LoadFormat
from engine.errors import ConfigError, ModelError

Edit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture
def base(bases: Path, tmp_path: Path) -> Path:
    """A copy of the tiny llama that a test may break."""
    target = tmp_path / "llama"
    shutil.copytree(bases / "llama", target)
    return target


def rewrite(base: Path, edit: Edit) -> None:
    tensors = load_file(base / "model.safetensors")
    edit(tensors)
    save_file(tensors, base / "model.safetensors")


def greedy(engine: Any) -> list[int]:
    sampling = engine.sampling_params(temperature=0.0, max_tokens=6, ignore_eos=True)
    return list(engine.generate([[1, 5, 9]], sampling)[0].token_ids)


def test_all_faults_are_listed_at_once(base: Path, make_engine: Any) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(500, 64)

    rewrite(base, edit)
    with pytest.raises(ModelError) as refused:
        make_engine(base)
    message = str(refused.value)
    assert "1 missing (model.norm.weight)" in message
    assert "1 surplus (model.layers.0.mlp.extra.weight)" in message
    assert "1 mis-shaped (lm_head.weight is [500, 64], expected [512, 64])" in message


def test_shards_with_an_index_load_as_one_file(base: Path, make_engine: Any) -> None:
    expected = greedy(make_engine(base))
    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, own in halves.items():
        save_file({name: tensors[name] for name in own}, base / shard)
    (base / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, own in halves.items() for name in own}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    assert greedy(make_engine(base)) == expected
    (base / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        make_engine(base)


def test_a_truncated_file_is_named(base: Path, make_engine: Any) -> None:
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        make_engine(base)


def test_buffers_and_a_tied_copy_of_the_head_are_passed_over(
    bases: Path, tmp_path: Path, make_engine: Any
) -> None:
    target = tmp_path / "tied"
    shutil.copytree(bases / "llama_tied", target)
    expected = greedy(make_engine(target))

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(target, edit)
    assert greedy(make_engine(target)) == expected


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda base: (base / "config.json").unlink(), r"config\.json: missing"),
        (
            lambda base: (base / "config.json").write_text("{"),
            r"config\.json: not readable as JSON",
        ),
        (
            lambda base: (base / "config.json").write_text("[]"),
            "holds a list, expected a JSON object",
        ),
        (
            lambda base: (base / "model.safetensors").unlink(),
            r"model\.safetensors is missing; expected",
        ),
        (lambda base: shutil.rmtree(base), "is no directory and no .gguf file"),
    ],
)
def test_broken_directories(
    base: Path, make_engine: Any, break_it: Callable[[Path], Any], message: str
) -> None:
    break_it(base)
    with pytest.raises(ModelError, match=message):
        make_engine(base)


def test_dummy_weights_need_a_config_only(base: Path, make_engine: Any) -> None:
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    dummy = {"load_format": LoadFormat.dummy, "dummy_seed": 3}
    first, second = (greedy(make_engine(base, model=dummy)) for _ in range(2))
    assert first == second
    assert greedy(make_engine(base, model=dummy | {"dummy_seed": 4})) != first


def test_a_context_longer_than_the_model_has_is_refused(base: Path, make_engine: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.max_model_len: got 513, llama allows at most 512"
    ):
        make_engine(base, model={"max_model_len": 513})


def test_the_hub_is_asked_only_for_its_prefix(
    base: Path, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = []

    def snapshot(repository: str, **options: Any) -> str:
        asked.append((repository, options["revision"]))
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    expected = greedy(make_engine(base))
    assert asked == []
    assert greedy(make_engine("hub:owner/name", model={"revision": "v1"})) == expected
    assert asked == [("owner/name", "v1")]
