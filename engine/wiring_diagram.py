"""The provider graph as a Mermaid flowchart, in the stages that follow from the graph itself."""

from typing import Any

from dependency_injector import providers

from engine.wiring_graph import (
    CALLERS,
    LEDGER,
    PLAN,
    POOL,
    VIEWS,
    AnyProvider,
    Graph,
    arguments,
    base_of,
    elements,
    is_lazy,
    lazy_target,
)
from engine.wiring_types import name_of

STAGES = {
    "host": "holds no device memory",
    "reserve": "takes the ledger, leaves a receipt",
    "size": "seals the ledger, the rest becomes KV pages",
    "run": "allocates nothing that outlives a step",
}


def diagram(container: Any) -> str:
    """`flowchart TD` of the live graph of `container`: an arrow leads from what is built first.

    Arrows that a longer way implies are left out, except those that carry a receipt. The text
    depends on the graph alone.
    """
    graph = Graph(container)
    shown: list[AnyProvider] = [node for node in graph.nodes if isinstance(node, CALLERS)]
    lines = ["flowchart TD"]
    for stage, meaning in STAGES.items():
        members = [node for node in shown if _stage(graph, node) == stage]
        if members:
            lines.append(f'  subgraph {stage}["{stage}: {meaning}"]')
            lines += [f'    {_id(graph, node)}["{_label(graph, node)}"]' for node in members]
            lines.append("  end")
    for node in shown:
        lines += _arrows(graph, node, shown)
    return "\n".join(lines)


def _stage(graph: Graph, node: AnyProvider) -> str:
    plan = graph.named[PLAN]
    if node is plan or node is graph.named[POOL]:
        return "size"
    if node is graph.named[LEDGER] or node in graph.reservers:
        return "reserve"
    return "run" if plan in graph.upstream(node) else "host"


def _id(graph: Graph, node: AnyProvider) -> str:
    return graph.name(node).replace(".", "_")


def _label(graph: Graph, node: AnyProvider) -> str:
    call = graph.call(node)
    lines = [graph.name(node), call.name if call else name_of(graph.made(node))]
    for argument in arguments(node):
        if argument.name == "cfg" and isinstance(argument.value, providers.AttributeGetter):
            lines.append(f"cfg.{argument.value.name}")
    return "<br/>".join(lines)


def _arrows(graph: Graph, node: AnyProvider, shown: list[AnyProvider]) -> list[str]:
    receipts = {owner for owner, _ in graph.receipts(node)}
    direct: dict[AnyProvider, str] = {}
    for argument in arguments(node):
        for value in elements(argument.value):
            if is_lazy(value):
                direct.setdefault(lazy_target(value), "-.->")
            else:
                base = base_of(value)
                is_receipt = base in receipts and isinstance(value, VIEWS)
                direct[base] = "-- receipt -->" if is_receipt else "-->"
    lines = []
    for other in shown:
        arrow = direct.get(other)
        longer = any(
            other in graph.upstream(third)
            for third in direct
            if third is not other and third in graph.nodes
        )
        if arrow and not (arrow == "-->" and longer):
            lines.append(f"  {_id(graph, other)} {arrow} {_id(graph, node)}")
    return lines
