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
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
MARKER = "PICKLE_CODE_WAS_EXECUTED"
Mutation = Callable[[Path, Random], None]

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 8, 16, 0.5, float("nan"), float("inf"), 10**400, "", "x",
    "none", "all", "lora_only", "q_proj", [], {}, [[]], [None], ["lm_head"], ["embed_tokens"],
    ["q_proj", 3],
    {"q_proj": 4}, {"q_proj": None}, {"(": 4}, {"": 4}, {".*": 4}, {"q_proj": float("nan")},
    {"a": {"b": {}}}, [[0, 2]], "((.|.)+)+[!?]", "\ud800", "é", "x\ny", [0] * 100_000,
    "x" * 100_000,
]  # fmt: skip
# Keys of patterns: ones that match as everybody expects; ones that not every library reads alike,
# that are wrong, or that take long or much memory.
SOUND_KEYS = [
    "q_proj", "layers.0.self_attn.q_proj", r".*\.1\..*", "^self_attn", "q_proj$", "[kq]_proj", "",
    "|", r"\Aq_proj", "(?i:Q_PROJ)", "(?P<a>q)_proj", "q_proj{1}", "(?=x)",
    r"layers\.\d+\.mlp\.\w+",
    "(k|down)_proj", r"model\.layers\.[01]\.(self_attn|mlp)\..*_proj", "no_such_module", "_proj",
    "embed_tokens|lm_head", r"(?!.*q_proj).*", "model.layers.1.mlp.up_proj", "(?#x)v_proj", ".*",
]  # fmt: skip
ODD_KEYS = [
    "[q&&k]_proj", "[a||q]_proj", "(?:xq_proj){e<=1}", "q_pro(?:j){i}", "[[:alpha:]]_proj",
    "[[:alpha:]_]*proj", "(?e)q", "(?V1)q", "(", "[", "*", "\\", "(?s)q", "a{3,1}", "(?<=a*)q",
    r"\p{L}", "{", "{e}", "q{,}", "a{99999999999}", "((.|.)+)+[!?]", "(a|aa)+$!",
    "((((a{1000}){1000}){1000}){1000})", "(" * 3000 + "a" + ")" * 3000, "x" * 100_000,
    "(" * 90 + "q_proj" + ")" * 90, "é", "q\nk", "\0",
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
    kind = draw.randrange(10)
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
    if kind >= 7:  # a key twice: saying the same, or before and after it another tensor's place
        again = json.dumps({name: entry if kind == 7 else header[other]})[1:-1]
        text = f"{text[:-1]}, {again}}}" if draw.random() < 0.5 else f"{{{again}, {text[1:]}"
    if kind == 9:
        again = json.dumps({other: entry})[1:-1]
        text = f"{{{again}, {text[1:]}"
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


def patterns(folder: Path, draw: Random) -> None:
    config = json.loads((folder / CONFIG).read_bytes())
    for name in draw.sample(["alpha_pattern", "rank_pattern"], draw.randint(1, 2)):
        number = config.get("r", 8) if name == "rank_pattern" else draw.randint(1, 64)
        keys = draw.choices(SOUND_KEYS, k=draw.randint(1, 4))
        keys += draw.choices(ODD_KEYS, k=draw.choice([0, 0, 1]))
        many = draw.random()
        if many < 0.02:
            keys = [f"layers.{index}.self_attn.q_proj" for index in range(300)]
        elif many < 0.04:
            keys = [f"{draw.choice(['(.|.){18}!|x', 'x'])}{index}" for index in range(2000)]
        config[name] = dict.fromkeys(keys, number)
    (folder / CONFIG).write_text(json.dumps(config))


def config_text(folder: Path, draw: Random) -> None:
    raw = (folder / CONFIG).read_bytes()
    texts: list[Callable[[], bytes]] = [
        lambda: b"", lambda: b"\xef\xbb\xbf" + raw, lambda: b"\xff\xfe" + raw, lambda: raw + raw,
        lambda: raw[: draw.randrange(len(raw))], lambda: b"[" + raw + b"]", lambda: b"null",
        lambda: b"NaN", lambda: b"[" * 100_000, lambda: b'{"a":' * 50_000,
        lambda: raw.replace(b'"', b"'"), lambda: raw.replace(b'"r"', b'"lora_alpha"'),
        lambda: raw.decode().encode("utf-16"), lambda: POINTER,
        lambda: b'{"peft_type": "LORA", "x": ' + b"[" * 960 + b"]" * 960 + b"}",
        lambda: _extended(raw, [(f"k{i}", None) for i in range(40_000)] + [("k3", None)]),
        lambda: _extended(raw, [(f"k{i}", i + 1) for i in range(10_000)]),
        lambda: _extended(raw, [("rank_pattern", {}), ("alpha_pattern", {"q_proj": 3})]),
        lambda: _extended(raw, [("x" * 1_000_000, 1)]),
        lambda: _extended(raw, [("\ud800\n", 1)]),
    ]  # fmt: skip
    (folder / CONFIG).write_bytes(draw.choice(texts)())


def _extended(raw: bytes, fields: list[tuple[str, Any]]) -> bytes:
    """An object of JSON with more fields at its end."""
    more = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields)
    return raw.rstrip()[:-1] + b", " + more.encode() + b"}"


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
        elif kind == 7 and tensor.numel():
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
    kind = draw.randrange(10)
    if kind == 0:
        found["x"] = _Bomb()
    elif kind == 1:
        found = draw.choice([[], None, {"a": 1}, {1: torch.ones(2)}, list(found.values()), "x"])
    elif kind == 2:
        target.write_bytes(pickle.dumps(_Bomb(), protocol=draw.randrange(6)))
        return
    elif kind == 3:
        found[draw.choice(sorted(found))] = torch.eye(4).to_sparse()
    elif kind >= 8:
        name = draw.choice(sorted(found))
        found[name] = draw.choice(_views(found[name], kind == 8))
    torch.save(found, target, _use_new_zipfile_serialization=draw.random() < 0.9)
    if kind == 7 and zipfile.is_zipfile(target):
        resize_record(target, draw)
    raw = bytearray(target.read_bytes())
    if kind == 4:
        for _ in range(draw.randint(1, 6)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    elif kind == 5:
        raw = raw[: draw.randrange(len(raw))]
    target.write_bytes(raw)


def _views(tensor: torch.Tensor, sound: bool) -> list[torch.Tensor]:
    """Tensors over fewer numbers than they show: of the same shape, or far larger than a file."""
    if not sound:
        one = torch.ones(1, dtype=tensor.dtype)
        return [one.expand(1 << 16, 1 << 16), one.expand(1 << 40), one[:0].expand(1 << 40, 0)]
    doubled = torch.stack([tensor, tensor], -1)
    return [
        tensor[:1].expand(tensor.shape), doubled[..., 1], torch.nn.Parameter(tensor.float()),
        torch._neg_view(tensor.float()), tensor.float().flip(0),
        torch.ones_like(tensor, device="meta"),
    ]  # fmt: skip


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
    kind = draw.randrange(9)
    if kind == 0:
        target.mkdir()
    elif kind == 1:
        target.symlink_to("nowhere")
    elif kind == 2:
        target.write_bytes(b"")
    elif kind == 3:
        target.write_bytes(POINTER)
    elif kind == 4:
        target.symlink_to(target.name)
    elif kind == 5:
        os.mkfifo(target)
    elif kind == 6:
        target.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/proc/self/mem", "/"]))
    elif kind == 7:
        target.write_bytes(b"{")
        os.truncate(target, 1 << (33 if name == CONFIG else 31))  # weights are mapped, not read
    elif kind == 8:
        shard = folder / "one.safetensors"
        os.mkfifo(shard) if draw.random() < 0.5 else shard.symlink_to("/dev/zero")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"x": shard.name}}))
        (folder / WEIGHTS).unlink(missing_ok=True)


MUTATIONS: dict[str, Mutation] = {
    own.__name__: own
    for own in (
        header_bytes, header_json, data_bytes, length, config_bytes, config_fields, config_text,
        patterns, tensors, odd_tensor, shards, pickles, files,
    )
}  # fmt: skip


def _weights(folder: Path) -> bytearray:
    return bytearray((folder / WEIGHTS).read_bytes())


def _write_weights(folder: Path, header: bytes, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
