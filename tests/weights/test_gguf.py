"""GGUF files written here from tiny models: the same tokens as the Hugging Face directory gives."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ModelError
from engine.models.spec import ModelSpec
from engine.text.tokenizer import Tokenizer
from engine.weights.gguf_file import NAMES, unpermute
from engine.weights.gguf_tokenizer import tokenizer_data

TO_GGUF = {name: kind for kind, name in NAMES.items()}


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{TO_GGUF[rest]}.{suffix}"
    return f"{TO_GGUF[stem]}.{suffix}"


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter stores q and k."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(base: Path, target: Path, architecture: str, **fields: Any) -> Path:
    config = json.loads((base / "config.json").read_text())
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model(fields.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(fields.get("pre", "smollm"))
    vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
    special = {"<s>", "</s>", "<pad>", "<unk>"}
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = vocabulary["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(2)
    for name, tensor in load_file(base / "model.safetensors").items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            kind = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            tensor = permute(tensor, config[kind])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def greedy(engine: Any) -> list[int]:
    sampling = engine.sampling_params(temperature=0.0, max_tokens=8, ignore_eos=True)
    return list(engine.generate([[1, 5, 9, 300]], sampling)[0].token_ids)


@pytest.mark.parametrize(
    ("base", "architecture"), [("llama", "llama"), ("llama_tied", "llama"), ("qwen2_bias", "qwen2")]
)
def test_same_tokens_as_the_directory(
    base: str, architecture: str, bases: Path, tmp_path: Path, make_engine: Any
) -> None:
    path = write(bases / base, tmp_path / "model.gguf", architecture)
    from_file, from_directory = make_engine(path), make_engine(bases / base)
    assert greedy(from_file) == greedy(from_directory)
    spec: ModelSpec = from_file.model.spec
    assert spec.rms_norm_eps == from_directory.model.spec.rms_norm_eps
    assert spec.tie_word_embeddings == (base == "llama_tied")
    text = "the cat sat on 12 mats"
    assert from_file.tokenizer.decode(from_file.tokenizer.encode(text)) == text


def test_unpermute_undoes_the_converter() -> None:
    weight = torch.randn(24, 7)
    assert torch.equal(unpermute(permute(weight, 3), 3), weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "viking"}, "tokenizer model 'gpt2' with pre-tokenizer 'viking' is not supported"),
        (
            {"tokenizer": "llama"},
            "tokenizer model 'llama' .* put the model's tokenizer.json beside",
        ),
    ],
)
def test_unknown_tokenizers_are_refused_unless_a_json_lies_beside(
    bases: Path, tmp_path: Path, make_engine: Any, fields: dict[str, str], message: str
) -> None:
    path = write(bases / "llama", tmp_path / "model.gguf", "llama", **fields)
    with pytest.raises(ModelError, match=message):
        make_engine(path)
    (tmp_path / "tokenizer.json").write_text((bases / "llama" / "tokenizer.json").read_text())
    assert len(greedy(make_engine(path))) == 8


def test_other_architectures_and_broken_files_are_named(
    bases: Path, tmp_path: Path, make_engine: Any
) -> None:
    path = write(bases / "llama", tmp_path / "model.gguf", "gemma")
    with pytest.raises(ModelError, match="GGUF architecture 'gemma' is not supported"):
        make_engine(path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 40)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        make_engine(broken)


def test_byte_level_tokenizer_from_metadata(bases: Path, tmp_path: Path) -> None:
    from engine.weights.gguf_file import GGUFFile

    path = write(bases / "llama", tmp_path / "model.gguf", "llama")
    tokenizer = Tokenizer(tokenizer_data(GGUFFile(path)))
    assert tokenizer.eos_token_ids == {2}
    assert len(tokenizer.encode("12345")) == 5, "smollm splits digits"
    assert tokenizer.encode("</s>") == [2]
