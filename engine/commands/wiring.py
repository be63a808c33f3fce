"""`command=wiring`: print the checked provider graph as a Mermaid diagram; nothing is built."""

from engine import wiring
from engine.commands.result import JobResult
from engine.containers import EngineContainer


def run(container: EngineContainer) -> JobResult:
    """Print the diagram."""
    print(wiring.diagram(container))
    return JobResult(tokens_per_second=None, kv_tokens=None)
