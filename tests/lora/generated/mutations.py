"""Ways in which an adapter's files can be wrong: each takes a folder and a source of chance, and
changes the files in place.
"""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
INDEX, PICKLED = "adapter_model.safetensors.index.json", "adapter_model.bin"
MARKER = "PICKLE_CODE_WAS_EXECUTED"
Mutation = Callable[[Path, Random], None]

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 8, 16, 0.5, float("nan"), float("inf"), 10**400, "", "x",
    "none", "all", "lora_only", "q_proj", [], {}, [[]], [None], ["lm_head"], ["embed_tokens"],
    ["q_proj", 3],
    {"q_proj": 4}, {"q_proj": None}, {"(": 4}, {"": 4}, {".*": 4}, {"q_proj": float("nan")},
    {"a": {"b": {}}}, [[0, 2]], "((.|.)+)+[!?]", "\ud800", "é",
]  # fmt: skip


class _Bomb:
    """Unpickling it makes a folder, if unpickling runs code."""

    def __reduce__(self) -> Any:
        return os.mkdir, (MARKER,)


def header_bytes(folder: Path, draw: Random) -> None:
    raw = _weights(folder)
    (length,) = struct.unpack("<Q", raw[:8])
    for _ in range(draw.randint(1, 4)):
        raw[draw.randrange(min(8 + length, len(raw)))] = draw.randrange(256)
    (folder / WEIGHTS).write_bytes(raw)


def data_bytes(folder: Path, draw: Random) -> None:
    raw = _weights(folder)
    (length,) = struct.unpack("<Q", raw[:8])
    for _ in range(draw.randint(1, 8)):
        raw[draw.randrange(8 + length, len(raw))] = draw.randrange(256)
    (folder / WEIGHTS).write_bytes(raw)


def length(folder: Path, draw: Random) -> None:
    raw = _weights(folder)
    if draw.random() < 0.6:
        raw = raw[: draw.randrange(len(raw))]
    else:
        raw += bytes(draw.randrange(256) for _ in range(draw.randint(1, 64)))
    (folder / WEIGHTS).write_bytes(raw)


def header_json(folder: Path, draw: Random) -> None:
    raw = _weights(folder)
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.choice(names), draw.choice(names)
    entry = header[name]
    kind = draw.randrange(8)
    if kind == 0:
        entry["dtype"] = draw.choice(["F16", "I32", "U8", "BOOL", "F64", "F4", "", 3])
    elif kind == 1:
        entry["shape"] = draw.choice(
            [[], [0], [-1], [1 << 62, 4], entry["shape"][::-1], "x", [[1]]]
        )
    elif kind == 2:
        entry["data_offsets"] = draw.choice([[0, 0], [8, 4], [0, 1 << 60], [-4, 4], [0], None])
    elif kind == 3:
        header[name], header[other] = header[other], header[name]
    elif kind == 4:
        entry["data_offsets"] = header[other]["data_offsets"]
    elif kind == 5:
        del header[name]
    elif kind == 6:
        header["__metadata__"] = draw.choice([{"a": 1}, {"format": "pt"}, [], "x", None])
    text = json.dumps(header)
    if kind == 7:  # the same key twice
        again = json.dumps({name: entry})[1:-1]
        text = f"{text[:-1]}, {again}}}"
    _write_weights(folder, text.encode(), bytes(data))


def config_bytes(folder: Path, draw: Random) -> None:
    raw = bytearray((folder / CONFIG).read_bytes())
    for _ in range(draw.randint(1, 3)):
        raw[draw.randrange(len(raw))] = draw.randrange(256)
    (folder / CONFIG).write_bytes(raw)


def config_fields(folder: Path, draw: Random) -> None:
    config = json.loads((folder / CONFIG).read_bytes())
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*config, "new_field", "use_dora", "lora_bias", "rank_pattern"])
        action = draw.randrange(3)
        if action == 0:
            config.pop(name, None)
        elif action == 1:
            config[name] = draw.choice(VALUES)
        else:
            config[draw.choice([*config, name.upper(), f"{name}s"])] = config.get(name)
    (folder / CONFIG).write_bytes(json.dumps(config).encode("utf-8", "surrogatepass"))


def config_text(folder: Path, draw: Random) -> None:
    raw = (folder / CONFIG).read_bytes()
    texts = [
        b"", b"\xef\xbb\xbf" + raw, b"\xff\xfe" + raw, raw[: draw.randrange(len(raw))], raw + raw,
        b"[" * 100_000, b'{"a":' * 50_000, b"[" + raw + b"]", b"null", b"NaN",
        raw.replace(b'"', b"'"),
        raw.replace(b'"r"', b'"lora_alpha"'), raw.decode().encode("utf-16"),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ]  # fmt: skip
    (folder / CONFIG).write_bytes(draw.choice(texts))


def tensors(folder: Path, draw: Random) -> None:
    found = _load(folder)
    for _ in range(draw.randint(1, 2)):
        name = draw.choice(sorted(found))
        tensor = found[name]
        found.pop(name)
        kind = draw.randrange(12)
        if kind == 0:
            continue
        if kind == 1:
            name = draw.choice(
                [
                    name.replace("layers.0", "layers.9"), name.replace("q_proj", "query"),
                    name.replace("lora_A", "lora_B"), name.replace("base_model.model.", ""),
                    name.replace("base_model", "other"), name + ".x", "x." + name, name.upper(),
                    name.replace(".weight", ""), name.replace("self_attn", "mlp"),
                    name.replace("lora_A", "lora_C"), name.replace("layers.1", "layers.0"),
                ]
            )  # fmt: skip
        elif kind == 2:
            found[name.removeprefix("base_model.model.")] = tensor.clone()
        elif kind == 3:
            found[name.replace(".weight", ".default.weight")] = tensor.clone()
        elif kind == 4:
            tensor = tensor.t().contiguous() if tensor.dim() == 2 else tensor[None]
        elif kind == 5:
            tensor = tensor.reshape(-1)
        elif kind == 6:
            dtype = draw.choice(
                [torch.int8, torch.bool, torch.int64, torch.float16, torch.float64,
                 torch.float8_e4m3fn, torch.float8_e5m2]
            )  # fmt: skip
            tensor = tensor.float().to(dtype)
        elif kind == 7:
            tensor = tensor.float().clone()
            tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice(
                [float("nan"), float("inf"), -float("inf")]
            )
        elif kind == 8:
            tensor = tensor[:0]
        elif kind == 9:
            tensor = torch.cat([tensor, tensor[:1]])
        elif kind == 10:
            tensor = tensor[:-1].clone()
        else:
            tensor = tensor.float() * draw.choice([0.0, 1e30, 1e-30, -1.0])
        found[name] = tensor
    save_file(found, folder / WEIGHTS)


def odd_tensor(folder: Path, draw: Random) -> None:
    found = _load(folder)
    name = draw.choice(
        [
            "base_model.model.model.norm.weight", "base_model.model.lm_head.weight", "x", "", ".",
            "base_model.model.model.embed_tokens.weight", "base_model.model.score.weight",
            "base_model.model.model.layers.0.mlp.gate.lora_A.weight",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
            "base_model.model.model.layers.0.self_attn.q_proj.bias", "..lora_A..weight",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "lora_A.weight",
            "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight",
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
        ]
    )  # fmt: skip
    found[name] = torch.randn(draw.choice([(1,), (64,), (64, 64), (8, 64), (512, 64), (2, 2, 2)]))
    save_file(found, folder / WEIGHTS)


def shards(folder: Path, draw: Random) -> None:
    found = _load(folder)
    names = sorted(found)
    cut = draw.randrange(len(names))
    parts = {"one.safetensors": names[:cut], "two.safetensors": names[cut:]}
    index = {name: shard for shard, own in parts.items() for name in own}
    for shard, own in parts.items():
        save_file({name: found[name] for name in own}, folder / shard)
    (folder / WEIGHTS).unlink(missing_ok=True)
    name = draw.choice(names)
    kind = draw.randrange(8)
    if kind == 0:
        index[name] = draw.choice(["../one.safetensors", "/etc/passwd", "", "three", "one"])
    elif kind == 1:
        index[name] = draw.choice(sorted(parts))
    elif kind == 2:
        del index[name]
    elif kind == 3:
        index["x"] = "one.safetensors"
    elif kind == 4:
        (folder / draw.choice(sorted(parts))).unlink()
    body: Any = {"weight_map": index}
    if kind == 5:
        body = draw.choice([{}, [], {"weight_map": []}, {"weight_map": {name: 3}}, None])
    text = json.dumps(body)
    (folder / INDEX).write_text(text[: draw.randrange(len(text))] if kind == 6 else text)


def pickles(folder: Path, draw: Random) -> None:
    found: Any = _load(folder)
    (folder / WEIGHTS).unlink(missing_ok=True)
    target = folder / PICKLED
    kind = draw.randrange(8)
    if kind == 0:
        found["x"] = _Bomb()
    elif kind == 1:
        found = draw.choice([[], None, {"a": 1}, {1: torch.ones(2)}, list(found.values()), "x"])
    elif kind == 2:
        target.write_bytes(pickle.dumps(_Bomb(), protocol=draw.randrange(6)))
        return
    elif kind == 3:
        found[draw.choice(sorted(found))] = torch.eye(4).to_sparse()
    torch.save(found, target)
    if kind == 7:
        resize_record(target, draw)
    raw = bytearray(target.read_bytes())
    if kind == 4:
        for _ in range(draw.randint(1, 6)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    elif kind == 5:
        raw = raw[: draw.randrange(len(raw))]
    target.write_bytes(raw)


def resize_record(path: Path, draw: Random) -> None:
    """Give one storage of a torch archive another length, in a sound archive."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice([name for name in records if "/data/" in name])
    old = records[name]
    records[name] = draw.choice([b"", old[:4], old[:-4], old + old, old + b"\0" * 4])
    with zipfile.ZipFile(path, "w") as archive:
        for own, record in records.items():
            archive.writestr(own, record)


def files(folder: Path, draw: Random) -> None:
    name = draw.choice([WEIGHTS, CONFIG])
    target = folder / name
    target.unlink(missing_ok=True)
    kind = draw.randrange(6)
    if kind == 0:
        target.mkdir()
    elif kind == 1:
        target.symlink_to("nowhere")
    elif kind == 2:
        target.write_bytes(b"")
    elif kind == 3:
        target.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == 4:
        target.symlink_to(target.name)


MUTATIONS: dict[str, Mutation] = {
    own.__name__: own
    for own in (
        header_bytes, header_json, data_bytes, length, config_bytes, config_fields, config_text,
        tensors, odd_tensor, shards, pickles, files,
    )
}  # fmt: skip


def _weights(folder: Path) -> bytearray:
    return bytearray((folder / WEIGHTS).read_bytes())


def _write_weights(folder: Path, header: bytes, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
