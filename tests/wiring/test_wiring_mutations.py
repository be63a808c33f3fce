"""Mistakes edited into containers.py, each with the exact message that a user sees; nothing is
built.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wiring_support import (
    ROOT,
    SOURCE,
    Change,
    changed_source,
    container_of,
    faults,
    refusal,
)

from engine.config import EngineConfig
from engine.containers import EngineContainer
from engine.wiring import build, check

CLASS = "class EngineContainer"
PLAN = "    memory_plan = providers.Singleton("
NOTHING_LEADS = (
    "workspace: reserves memory, so memory_plan must need it; nothing leads from memory_plan to it"
)
NO_RECEIPT = (
    "lora_manager: reserves memory, but memory_plan does not get its receipt; add "
    "lora_manager.provided.receipt to receipts"
)
LATE = (
    "class LateBuffers:\n"
    "    def __init__(self, ledger: MemoryLedger, kv_pool: KVPool) -> None:\n"
    "        self.receipt = ledger.reserve('late_buffers', kv_pool.num_bytes, 'too late')\n\n\n"
)
MISTAKES: dict[str, tuple[list[Change], list[str]]] = {
    "no receipt": ([("            workspace.provided.receipt,\n", "")], [NOTHING_LEADS]),
    "receipt forgotten, upstream by another way": (
        [("            lora_manager.provided.receipt,\n", "")],
        [NO_RECEIPT],
    ),
    "late reserver": (
        [
            (CLASS, LATE + CLASS),
            (
                "    audit = ",
                "    late_buffers = providers.Singleton(LateBuffers, ledger=ledger, "
                "kv_pool=kv_pool)\n    audit = ",
            ),
        ],
        [
            "late_buffers: reserves memory, so memory_plan must need it; it is the other way "
            "round: late_buffers -> kv_pool -> memory_plan"
        ],
    ),
    "factory": (
        [("Component(LoRAManager", "providers.Factory(LoRAManager")],
        [
            "lora_manager: reserves memory, but a Factory would do so once per user; make it a "
            "Singleton"
        ],
    ),
    "lazy receipt": (
        [("workspace.provided.receipt", "workspace.provider")],
        [
            "memory_plan: MemoryPlan.build(receipts) takes Receipt items, workspace.provider "
            "is built later, by whoever calls it; wire workspace itself",
            "workspace: reserves memory, so memory_plan must need it; memory_plan has only "
            "workspace.provider, which builds it later",
        ],
    ),
    "lazy plan": (
        [("plan=memory_plan, model", "plan=memory_plan.provider, model")],
        [
            "kv_pool: KVPool(plan) takes MemoryPlan, memory_plan.provider is built later, by "
            "whoever calls it; wire memory_plan itself",
            "kv_pool: is sized by memory_plan, so it must need it; kv_pool has only "
            "memory_plan.provider, which builds it later",
        ],
    ),
    "no plan": (
        [("plan=memory_plan, model", "model")],
        [
            "kv_pool: KVPool needs 'plan', which nothing gives; wire plan=memory_plan",
            "kv_pool: is sized by memory_plan, so it must need it; nothing leads from kv_pool to "
            "memory_plan",
        ],
    ),
    "the component in place of its receipt": (
        [("lora_manager.provided.receipt", "lora_manager")],
        [
            "memory_plan: MemoryPlan.build(receipts) takes Receipt items, lora_manager is a "
            "LoRAManager",
            NO_RECEIPT,
        ],
    ),
    "misspelt attribute": (
        [("lora_manager.provided.receipt", "lora_manager.provided.reciept")],
        [
            "memory_plan: MemoryPlan.build(receipts) reads LoRAManager.reciept, which does not "
            "exist; did you mean 'receipt'?",
            NO_RECEIPT,
        ],
    ),
    "second ledger": (
        [
            (
                "    model = Component(",
                "    spare = providers.Singleton(MemoryLedger, cfg=cfg.memory, device=device)\n"
                "    model = Component(",
            ),
            (
                "model=model, device=device, ledger=ledger)",
                "model=model, device=device, ledger=spare)",
            ),
        ],
        [
            "spare: is a second MemoryLedger (wired to lora_manager); memory_plan seals only "
            "'ledger', wire that one to all"
        ],
    ),
    "cycle": (
        [(PLAN, "    topology.add_kwargs(tp_size=model.provided.max_model_len)\n" + PLAN)],
        ["topology: needs itself: topology -> model -> topology"],
    ),
    "another component's section": (
        [("LoRAManager, cfg=cfg.lora", "LoRAManager, cfg=cfg.memory")],
        [
            "lora_manager: LoRAManager(cfg) takes LoRAConfig, cfg.memory is a MemoryConfig; did "
            "you mean cfg.lora?"
        ],
    ),
    "misspelt section": (
        [("LoRAManager, cfg=cfg.lora", "LoRAManager, cfg=cfg.loar")],
        [
            "lora_manager: LoRAManager(cfg) reads EngineConfig.loar, which does not exist; did "
            "you mean 'lora'?"
        ],
    ),
    "misspelt keyword": (
        [("graphs=graphs,\n        lora_manager=", "graphs=graphs,\n        loras=")],
        ["runner: ModelRunner has no parameter 'loras'; did you mean 'lora_manager'?"],
    ),
    "wrong component": (
        [("plan=memory_plan, model=model", "plan=memory_plan, model=lora_manager")],
        [
            "kv_pool: KVPool(model) takes DecoderModel, lora_manager is a LoRAManager; did you "
            "mean model?"
        ],
    ),
    "undefined Dependency": (
        [(PLAN, "    spare_device = providers.Dependency(instance_of=Device)\n" + PLAN)],
        [
            "spare_device: nothing is given for this Dependency; give an instance of Device when "
            "the container is made"
        ],
    ),
    "plan without its ledger": (
        [("        ledger=ledger,\n        receipts", "        receipts")],
        [
            "memory_plan: MemoryPlan.build needs 'ledger', which nothing gives; wire ledger=ledger",
            "memory_plan: seals the ledger, so it must be wired to 'ledger'; it is not",
        ],
    ),
    "reserver inside another provider": (
        [
            (
                "Sampler, device=device",
                "Sampler, device=providers.Singleton(LoRAManager, cfg=cfg.lora, model=model, "
                "device=device, ledger=ledger)",
            )
        ],
        [
            "sampler: Sampler(device) takes Device, sampler.device is a LoRAManager; did you "
            "mean device?",
            "sampler.device: reserves memory, so memory_plan must need it; nothing leads from "
            "memory_plan to it",
        ],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(mistake: str) -> None:
    changes, expected = MISTAKES[mistake]
    assert refusal(container_of(changed_source(*changes))) == expected


def test_all_faults_come_at_once() -> None:
    names = ("misspelt section", "misspelt keyword", "no plan")
    changes = [change for name in names for change in MISTAKES[name][0]]
    lines = refusal(container_of(changed_source(*changes)))
    assert lines == [
        *MISTAKES["misspelt section"][1],
        MISTAKES["no plan"][1][0],
        *MISTAKES["misspelt keyword"][1],
        MISTAKES["no plan"][1][1],
    ]


def moved_block() -> str:
    """containers.py with the ledger's line below the model's block."""
    start = SOURCE.index("    ledger = ")
    end = SOURCE.index("    model = Component(")
    ledger = SOURCE[start:end]
    after_model = SOURCE.index("    lora_manager = ")
    return SOURCE[:start] + SOURCE[end:after_model] + ledger + SOURCE[after_model:]


def test_moved_lines_do_not_import() -> None:
    with pytest.raises(NameError, match="name 'ledger' is not defined"):
        container_of(moved_block())


@pytest.mark.parametrize(
    "source, message",
    [
        (
            moved_block(),
            r"containers\.py:\d+: 'ledger' is used above its definition in line \d+; providers "
            r"stand in start-up order, move that definition up or this one down\n",
        ),
        (
            changed_source(*MISTAKES["factory"][0]),
            "lora_manager: reserves memory, but a Factory would do so once per user; make it a "
            "Singleton\n",
        ),
        (
            changed_source(
                ("model=model, attention=attention", "model=modle, attention=attention")
            ),
            r"containers\.py:\d+: 'modle' is not defined; did you mean 'model'\?\n",
        ),
    ],
    ids=["moved", "factory", "misspelt provider"],
)
def test_what_a_user_sees(source: str, message: str, tmp_path: Path) -> None:
    package = tmp_path / "engine"
    package.mkdir()
    for path in (ROOT / "engine").iterdir():
        if path.name not in ("containers.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    (package / "containers.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "engine", "command=plan", "model.path=/nowhere"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert re.fullmatch(message, done.stderr), done.stderr


def test_the_container_as_it_is() -> None:
    container = build(EngineConfig())
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        check(container)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05


def test_a_container_without_config_is_checked_by_its_types() -> None:
    assert faults(EngineContainer()) == [
        "config: nothing is given for this Dependency; give an instance of EngineConfig when the "
        "container is made"
    ]
