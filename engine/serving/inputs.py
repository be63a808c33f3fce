"""What callers hand to the engine, checked: prompts, adapters with weights, sampling parameters
that depend on the model.

Every refusal is a RequestError or AdapterError that says what was found and what is allowed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import RequestError
from engine.lora.manager import LoRAManager
from engine.lora.ref import LoRAUse
from engine.models.decoder import DecoderModel
from engine.runtime.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

MAX_ADAPTER_WEIGHT = 10.0

Prompt = str | Sequence[int]
# A name, or names with weights: what each adapter adds is multiplied by its weight and summed.
AdapterChoice = str | Mapping[str, float]


def prompt_ids(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, model: DecoderModel
) -> list[int]:
    """Token ids of a prompt that leaves room for the answer. Raises RequestError."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
    if not ids:
        raise RequestError("the prompt is empty; at least one token is needed")
    _check_in_vocabulary("token ids", ids, model.spec.vocab_size)
    limit = model.max_model_len
    if len(ids) + params.max_tokens > limit:
        raise RequestError(
            f"{len(ids)} prompt tokens + max_tokens {params.max_tokens} exceed the model's "
            f"{limit} positions by {len(ids) + params.max_tokens - limit}; shorten the prompt "
            "or lower max_tokens"
        )
    return ids


def check_params(params: SamplingParams, tokenizer: Tokenizer, model: DecoderModel) -> None:
    """Raise RequestError if this model cannot do what is asked."""
    for name in ("stop", "bad_words"):
        if getattr(params, name) and not tokenizer.available:
            instead = "; use stop_token_ids" if name == "stop" else ""
            raise RequestError(f"{name}: this model has no tokenizer.json{instead}")
    biased = [token_id for token_id, _ in params.logit_bias]
    _check_in_vocabulary("logit_bias: token ids", biased, model.spec.vocab_size)


def adapter_uses(choice: AdapterChoice | None, manager: LoRAManager) -> tuple[LoRAUse, ...]:
    """The loads behind names, in their order; those of weight 0 are left out. Raises AdapterError
    on an unknown name, RequestError on bad weights.
    """
    if choice is None:
        return ()
    if isinstance(choice, str):
        return (LoRAUse(manager.resolve(choice).lora_id),)
    if not isinstance(choice, Mapping) or not all(isinstance(name, str) for name in choice):
        raise RequestError(
            f"adapter: got {choice!r}, allowed is a name or a mapping of names to weights"
        )
    limit = manager.max_loras_per_batch
    if not 1 <= len(choice) <= limit:
        raise RequestError(
            f"adapter: got {len(choice)} names, allowed are 1 to {limit} (lora.max_loras_per_batch)"
        )
    loads = [(manager.resolve(name).lora_id, _weight(name, choice[name])) for name in choice]
    return tuple(LoRAUse(lora_id, weight) for lora_id, weight in loads if weight)


def check_priority(priority: Any) -> None:
    """Raise RequestError unless it is a whole number."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority: got {priority!r}, allowed is a whole number")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text or token ids) or several, as a list. Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts: got {prompts!r}, allowed are texts and lists of token ids")
    ids = [item for item in prompts if isinstance(item, int)]
    if len(ids) == len(prompts) and ids:
        return [ids]
    if ids:
        raise RequestError("prompts: token ids and whole prompts are mixed; give one kind")
    return [item for item in prompts if not isinstance(item, int)]


def per_prompt(value: Any, count: int, what: str) -> list[Any]:
    """One value for all prompts, or one for each, as a list. Raises RequestError."""
    if value is None or isinstance(value, str | Mapping | SamplingParams):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise RequestError(f"{what}: {len(values)} values were given for {count} prompts")
    return values


def _token_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, Sequence):
        raise RequestError(f"prompt: got {prompt!r}, allowed is a text or a list of token ids")
    for token_id in prompt:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise RequestError(f"prompt: got {token_id!r} among the token ids, allowed are ints")
    return list(prompt)


def _check_in_vocabulary(what: str, ids: Sequence[int], vocab_size: int) -> None:
    outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if outside:
        raise RequestError(
            f"{what} {outside[:3]} are outside the vocabulary of 0 to {vocab_size - 1}"
        )


def _weight(name: str, weight: Any) -> float:
    ok = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not ok or not abs(weight) <= MAX_ADAPTER_WEIGHT:
        raise RequestError(
            f"adapter {name!r}: got weight {weight!r}, allowed is a number from "
            f"{-MAX_ADAPTER_WEIGHT:g} to {MAX_ADAPTER_WEIGHT:g}"
        )
    return float(weight)
