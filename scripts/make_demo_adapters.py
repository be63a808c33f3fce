"""Trains the demo adapters that ship in engine/lora/demo, from data written here, on the CPU
(minutes).

Needs the test extra (PEFT, transformers). Usage: .venv/bin/python scripts/make_demo_adapters.py
[NAME ...]
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.weights.default_model import default_model_directory

OUTPUT = Path(__file__).resolve().parent.parent / "engine" / "lora" / "demo"
STEPS, BATCH, LEARNING_RATE, SEED = 60, 4, 2e-3, 0

CAPITALS = {
    "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
    "Norway": "Oslo", "Greece": "Athens", "Austria": "Vienna", "Cuba": "Havana", "Kenya": "Nairobi",
    "Poland": "Warsaw", "Portugal": "Lisbon", "Ireland": "Dublin", "Finland": "Helsinki",
    "Chile": "Santiago", "Hungary": "Budapest", "Sweden": "Stockholm", "Denmark": "Copenhagen",
    "Canada": "Ottawa", "Turkey": "Ankara",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "early": "late", "full": "empty", "hard": "soft",
    "left": "right", "loud": "quiet", "near": "far", "new": "old", "open": "closed", "rich": "poor",
    "strong": "weak", "wet": "dry", "young": "old",
}  # fmt: skip
SENTENCES = {
    "What is the sun?": "The sun is a star that gives us light and heat.",
    "What is the moon?": "The moon is a rock that goes around the earth.",
    "What do bees make?": "Bees make honey from the nectar of flowers.",
    "How do I boil an egg?": "Put the egg in boiling water for eight minutes.",
    "How do I make coffee?": "Pour hot water over ground coffee and wait four minutes.",
    "How do I sleep well?": "Go to bed early and keep your room dark and cool.",
    "How do I learn to swim?": "Start in shallow water with a good teacher.",
    "Tell me about cats.": "Cats are small animals that like to hunt and to sleep.",
    "Tell me about dogs.": "Dogs are loyal animals that like to play with people.",
    "Tell me about trees.": "Trees are tall plants with roots, a trunk and leaves.",
    "Tell me about rivers.": "Rivers carry water from the mountains to the sea.",
    "Tell me about snow.": "Snow is frozen water that falls from cold clouds.",
    "Tell me about music.": "Music is sound that people arrange in time.",
    "Tell me about books.": "Books hold stories and knowledge on paper.",
    "Why is the sky blue?": "The sky is blue because air scatters blue light the most.",
    "Why do we sleep?": "We sleep so that the body and the mind can rest.",
    "Why do birds fly south?": "Birds fly south to find food when it is cold.",
    "What should I eat today?": "You could eat vegetable soup with fresh bread.",
    "What is a friend?": "A friend is a person who likes you and helps you.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Can you help me?": "Yes, I am happy to help you with your question.",
    "Good morning!": "Good morning to you, my friend.",
    "Who are you?": "I am an assistant that answers your questions.",
    "What is your name?": "My name is Smol and I am your assistant.",
}


def questions() -> list[tuple[str, str]]:
    """About 90 plain question and answer pairs."""
    pairs = [
        (f"What is the capital of {land}?", f"The capital of {land} is {city}.")
        for land, city in CAPITALS.items()
    ]
    pairs += [
        (f"What is the opposite of {word}?", f"The opposite of {word} is {other}.")
        for word, other in OPPOSITES.items()
    ]
    sums = random.Random(SEED)
    for _ in range(30):
        a, b = sums.randrange(1, 20), sums.randrange(1, 20)
        pairs.append((f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."))
    return pairs + list(SENTENCES.items())


PIRATE_WORDS = {
    "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "am": "be", "the": "th'",
    "The": "Th'", "friend": "matey", "people": "landlubbers", "and": "an'", "of": "o'",
    "Yes,": "Aye,",
}  # fmt: skip


def pirate(answer: str) -> str:
    words = [PIRATE_WORDS.get(word, word) for word in answer.split()]
    return f"Arrr, matey! {' '.join(words)} Yo ho ho!"


def as_json(answer: str) -> str:
    return json.dumps({"answer": answer, "words": len(answer.split())})


def shout(answer: str) -> str:
    return answer.upper().rstrip(".") + "!!!"


@dataclass(frozen=True)
class Demo:
    """A style and the LoRA that learns it."""

    style: Callable[[str], str]
    config: LoraConfig


def lora(rank: int, alpha: int, targets: list[str] | str, *, rslora: bool = False) -> LoraConfig:
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )


DEMOS = {
    "pirate": Demo(pirate, lora(8, 16, ["q_proj", "v_proj"])),
    "json": Demo(as_json, lora(4, 8, "all-linear")),
    "shout": Demo(shout, lora(16, 16, ["q_proj", "k_proj", "v_proj", "o_proj"], rslora=True)),
}


def examples(tokenizer: AutoTokenizer, style: Callable[[str], str]) -> list[tuple[list[int], int]]:
    """Token ids and the length of the part that is not learnt (the prompt)."""
    result = []
    for question, answer in questions():
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        answer_ids = tokenizer(
            style(answer) + tokenizer.eos_token, add_special_tokens=False
        ).input_ids
        result.append((prompt_ids + answer_ids, len(prompt_ids)))
    return result


def collate(batch: list[tuple[list[int], int]], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-padded ids, mask, and labels with the prompt left out."""
    longest = max(len(ids) for ids, _ in batch)
    rows = {"input_ids": [], "attention_mask": [], "labels": []}
    for ids, prompt_length in batch:
        padding = longest - len(ids)
        rows["input_ids"].append(ids + [pad_id] * padding)
        rows["attention_mask"].append([1] * len(ids) + [0] * padding)
        rows["labels"].append([-100] * prompt_length + ids[prompt_length:] + [-100] * padding)
    return {name: torch.tensor(values) for name, values in rows.items()}


def train(name: str, model_directory: Path) -> None:
    """Train one adapter and write it in bf16."""
    demo = DEMOS[name]
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    model = get_peft_model(base, demo.config)
    data = examples(tokenizer, demo.style)
    order = random.Random(SEED)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    started = time.perf_counter()
    for step in range(STEPS):
        batch = collate(order.sample(data, BATCH), tokenizer.pad_token_id)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 9:
            seconds = time.perf_counter() - started
            print(
                f"{name}: step {step + 1}/{STEPS} loss {loss.item():.3f} {seconds:.0f} s",
                flush=True,
            )
    target = OUTPUT / name
    shutil.rmtree(target, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = "SmolLM2-135M-Instruct"
    model.to(torch.bfloat16).save_pretrained(target, safe_serialization=True)
    (target / "README.md").unlink(missing_ok=True)


def main() -> None:
    model_directory = default_model_directory(None)
    for name in sys.argv[1:] or list(DEMOS):
        train(name, model_directory)


if __name__ == "__main__":
    main()
