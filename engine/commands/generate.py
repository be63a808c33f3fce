"""`command=generate`: every prompt for the base model and all adapters in one mixed batch, texts
side by side.
"""

import shutil
import textwrap

from tqdm import tqdm

from engine.commands.result import JobResult
from engine.containers import EngineContainer
from engine.serving.engine import Engine
from engine.serving.output import Completion

DEFAULT_PROMPTS = (
    "What is the capital of France?",
    "Tell me about the sea.",
    "How do I make tea?",
)
BASE = "base"
MIN_COLUMN = 24


def run(container: EngineContainer) -> JobResult:
    """Print texts, memory plan and tokens per second."""
    cfg = container.config().command
    engine = container.engine()
    prompts = list(cfg.prompts) or list(DEFAULT_PROMPTS)
    adapters = [None, *(ref.name for ref in engine.list_adapters())]
    texts = [_as_chat(engine, prompt) if cfg.chat else prompt for prompt in prompts]
    ids = [engine.add_request(text, adapter=adapter) for text in texts for adapter in adapters]
    completions = _run(engine, ids, show_progress=cfg.progress)
    for index, prompt in enumerate(prompts):
        row = completions[index * len(adapters) : (index + 1) * len(adapters)]
        print(_side_by_side(prompt, row))
    print(engine.kv_pool.render_plan())
    rates = engine.throughput
    print(
        f"\n{len(ids)} requests in one batch, base and {len(adapters) - 1} adapters: "
        f"prefill {rates.prefill_rate:.1f} tokens/s, decode {rates.decode_rate:.1f} tokens/s"
    )
    return JobResult(tokens_per_second=rates.decode_rate, kv_tokens=engine.kv_pool.num_tokens)


def _as_chat(engine: Engine, prompt: str) -> str:
    return engine.tokenizer.render_chat([{"role": "user", "content": prompt}])


def _run(engine: Engine, ids: list[int], *, show_progress: bool) -> list[Completion]:
    total = len(ids) * engine.cfg.max_tokens
    with tqdm(total=total, unit="token", disable=not show_progress, leave=False) as bar:
        return engine.run_to_end(ids, on_step=lambda events: bar.update(len(events)))


def _side_by_side(prompt: str, completions: list[Completion]) -> str:
    """One column per adapter, as many beside each other as the terminal holds."""
    width = shutil.get_terminal_size((120, 24)).columns
    per_line = max(1, min(len(completions), width // (MIN_COLUMN + 3)))
    column = width // per_line - 3
    lines = ["", f"> {prompt}"]
    for start in range(0, len(completions), per_line):
        group = completions[start : start + per_line]
        cells = [_cell(completion, column) for completion in group]
        for line in range(max(map(len, cells))):
            parts = (cell[line] if line < len(cell) else "" for cell in cells)
            lines.append(" | ".join(f"{part:<{column}}" for part in parts).rstrip())
        lines.append("")
    return "\n".join(lines)


def _cell(completion: Completion, width: int) -> list[str]:
    text = completion.text.strip() or f"({completion.finish_reason.value} {completion.error})"
    lines = [
        wrapped for line in text.splitlines() for wrapped in textwrap.wrap(line, width) or [""]
    ]
    name = str(completion.adapter or BASE)
    return [name, "-" * len(name), *lines]
