"""Makes a `tokenizers` tokenizer from GGUF metadata: byte-level BPE with known pre-tokenizers.

Others are refused by name: a tokenizer.json beside the file always works.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import ModelError
from engine.text.tokenizer import TokenizerData
from engine.weights.gguf_file import GGUFFile

CONTROL, USER_DEFINED = 3, 4
# Split patterns as in the models' own tokenizer.json.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def _pre_tokenizer(name: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return byte_level
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    patterns = {"qwen2": QWEN2, "llama-bpe": LLAMA3}
    if name not in patterns:
        return None
    split = pre_tokenizers.Split(Regex(patterns[name]), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, plain])


def tokenizer_data(file: GGUFFile) -> TokenizerData:
    """Vocabulary, special tokens and chat template of a GGUF file. Raises ModelError by name."""
    model, pre = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "default")
    pre_tokenizer = _pre_tokenizer(pre) if model == "gpt2" else None
    if pre_tokenizer is None:
        raise ModelError(
            f"{file.path}: tokenizer model {model!r} with pre-tokenizer {pre!r} is not "
            "supported in "
            "GGUF files; put the model's tokenizer.json beside the file"
        )
    tokens: list[str] = file.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.field("tokenizer.ggml.merges")]
    types: list[int] = file.field("tokenizer.ggml.token_type", [1] * len(tokens))
    own = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    own.pre_tokenizer = pre_tokenizer
    own.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            added = AddedToken(token, special=kind == CONTROL, normalized=False)
            own.add_special_tokens([added]) if kind == CONTROL else own.add_tokens([added])
    config: dict[str, Any] = {"chat_template": file.field("tokenizer.chat_template")}
    for role in ("bos", "eos", "unknown", "padding"):
        token_id = file.field(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            short = {"unknown": "unk", "padding": "pad"}.get(role, role)
            config[f"{short}_token"] = tokens[token_id]
    return TokenizerData(own.to_str(), config)
