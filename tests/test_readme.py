"""The README shows the wiring as it is."""

from pathlib import Path

from engine import wiring
from engine.config import EngineConfig

README = Path(__file__).parent.parent / "README.md"


def test_the_diagram_is_the_generated_one() -> None:
    block = f"```mermaid\n{wiring.diagram(wiring.build(EngineConfig())).strip()}\n```"
    shown = README.read_text().split("<!-- wiring -->")[1].split("<!-- /wiring -->")[0]
    assert shown.strip() == block, "paste the output of `scripts/run command=wiring`"
