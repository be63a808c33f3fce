"""Adapters of random recipes through the engine, one or many."""

import tempfile
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random

import torch
from adapter_space import MAX_RANK, Recipe, draw_recipe
from conftest import tiny_config
from peft_oracle import PROMPT, base_folder, make
from tests_support import prompt_logits

from engine import wiring
from engine.errors import AdapterError
from engine.serving.engine import Engine

# What PEFT raises on settings that it cannot combine.
IMPOSSIBLE = (ValueError, NotImplementedError, TypeError, KeyError, AttributeError, RuntimeError)
TOLERANCE = 1e-4


class Impossible(Exception):
    """PEFT itself refuses the combination."""


def run_one(seed: int, bases: Path) -> tuple[Recipe, str, str]:
    """Draw, make and check the adapter of a seed: (recipe, outcome, fault), see `check`. Raises
    Impossible.
    """
    recipe = draw_recipe(Random(seed))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "adapter"
        try:
            expected = make(recipe, folder, bases, seed)
        except IMPOSSIBLE as error:
            raise Impossible(str(error)) from error
        return recipe, *check(recipe, expected, folder, engine_for(recipe.base, bases))


def make_sound(count: int, bases: Path, folder: Path) -> None:
    """Save adapters that load, each in one file of weights, as folder/BASE-SEED."""
    seed = 0
    while count:
        recipe = draw_recipe(Random(seed))
        if not recipe.cause and recipe.form == "safetensors" and recipe.base != "qwen3":
            with suppress(*IMPOSSIBLE):
                make(recipe, folder / f"{recipe.base}-{seed}", bases, seed)
                count -= 1
        seed += 1


def check(
    recipe: Recipe, expected: torch.Tensor | None, folder: Path, engine: Engine
) -> tuple[str, str]:
    """(outcome, fault): "loaded" or "refused", and what is wrong with that, if anything."""
    try:
        engine.load_adapter("made", folder)
    except AdapterError as refused:
        if recipe.cause and recipe.cause.split("_config")[0] in str(refused):
            return "refused", ""
        return "refused", f"refused, cause expected {recipe.cause!r}: {refused}"
    found = prompt_logits(engine, PROMPT, "made")
    engine.unload_adapter("made")
    if expected is None:
        return "loaded", f"loaded, a refusal for {recipe.cause!r} was expected"
    scale = max(1.0, expected.abs().max().item())
    error = (found - expected).abs().max().item()
    if not error <= TOLERANCE * scale:
        return "loaded", f"logits differ by {error:.2e}"
    changed = (found - prompt_logits(engine, PROMPT, None)).abs().max().item()
    return "loaded", "" if changed > 10 * TOLERANCE * scale else "nothing differs from the base"


@cache
def engine_for(name: str, bases: Path) -> Engine:
    """An engine on a base, its pool large enough for every recipe."""
    config = tiny_config(
        base_folder(name, bases),
        lora={"max_lora_rank": MAX_RANK},
        memory={"prefix_cache": False},
        memory_bytes=128 << 20,
    )
    return wiring.build(config).engine()


def run_many(count: int, seed: int, bases: Path) -> int:
    """Adapters of `count` seeds; prints counts by feature and outcome, returns the exit status."""
    outcomes: Counter[str] = Counter()
    features: Counter[tuple[str, str]] = Counter()
    faults = []
    for own in range(seed, seed + count):
        try:
            recipe, outcome, fault = run_one(own, bases)
        except Impossible as impossible:
            outcomes["impossible"] += 1
            features[f"impossible: {str(impossible)[:40]!r}", "impossible"] += 1
            continue
        outcomes[outcome] += 1
        for feature in recipe.features:
            features[feature, outcome] += 1
        if fault:
            faults.append(f"seed {own}: {fault}; {recipe}")
    names = sorted({feature for feature, _ in features})
    columns = ("loaded", "refused", "impossible")
    print(f"{'feature':<56}" + "".join(f"{column:>12}" for column in columns))
    for name in names:
        print(f"{name:<56}" + "".join(f"{features[name, column]:>12}" for column in columns))
    print(f"{'all':<56}" + "".join(f"{outcomes[column]:>12}" for column in columns))
    print(f"{len(faults)} faults")
    for fault in faults[:20]:
        print("  ", fault)
    return 1 if faults else 0
