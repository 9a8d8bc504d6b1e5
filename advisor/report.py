"""What ``kvgraph status`` and ``kvgraph explain`` print for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def status_report(status: Mapping[str, Any]) -> RenderableType:
    """A sidecar's ``/status`` as tables."""
    parts: list[RenderableType] = [_summary(status), _engines(status["engines"])]
    if any(engine["graph"] for engine in status["engines"]):
        parts.append(_layers(status["engines"]))
    return Group(*parts)


def facts_report(title: str, facts: Mapping[str, Any]) -> RenderableType:
    """One explained thing: a row a fact, nested ones indented below their name."""
    table = Table(title=plain(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(plain(name), plain(_line(value)))
    return table


def plain(text: object) -> Text:
    """Text as it is: no markup, and nothing that moves the cursor or turns the writing round."""
    return Text(
        "".join(
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(text)
        )
    )


def _summary(status: Mapping[str, Any]) -> RenderableType:
    graph, counters, snapshot = status["graph"], status["counters"], status["snapshot"]
    ingest = counters["ingest"]
    facts = {
        "endpoint": status["endpoint"],
        "blocks known": f"{graph['blocks']:,} in {graph['bytes'] / 1e6:.1f} MB",
        "edges": _pairs(graph["edges"]),
        "sessions": _pairs(graph["sessions"]),
        "events": f"{ingest.get('events', 0):,} in {ingest.get('messages', 0):,} messages",
        "refused": sum(count for name, count in ingest.items() if "refused" in name),
        "gaps": ingest.get("gaps", 0) + ingest.get("kv_gaps", 0),
        "engines lost": ingest.get("engines_lost", 0),
        "protected evicted": graph["counters"].get("protected_evicted", 0),
    }
    if snapshot["error"]:
        facts["snapshot"] = snapshot["error"]
    if status["config"]["error"]:
        facts["configuration"] = status["config"]["error"]
    title = f"kvgraph {status['version']}, process {status['pid']}, {status['http']}"
    return facts_report(title, facts)


def _engines(engines: list[Mapping[str, Any]]) -> RenderableType:
    if not engines:
        return Text("no engine is connected")
    table = Table(title="engines", title_justify="left")
    for column in ("name", "model", "state", "resident", "ranking age", "moved", "dropped", "gaps"):
        numeric = column not in ("name", "model", "state")
        table.add_column(column, justify="right" if numeric else "left")
    for engine in engines:
        graph = engine["graph"] or {}
        applied = graph.get("applied") or {}
        cells = (
            engine["name"],
            engine["model"],
            engine["state"],
            graph.get("resident", 0),
            _seconds(engine["ranking_age_s"]),
            applied.get("moved", "-"),
            applied.get("dropped", "-"),
            engine["gaps"],
        )
        table.add_row(*map(plain, cells))
    return table


def _layers(engines: list[Mapping[str, Any]]) -> RenderableType:
    table = Table(title="resident blocks by layer", title_justify="left")
    table.add_column("layer")
    shown = [engine for engine in engines if engine["graph"]]
    for engine in shown:
        table.add_column(plain(engine["name"]), justify="right")
    for layer in shown[0]["graph"]["layers"]:
        table.add_row(layer, *(f"{engine['graph']['layers'][layer]:,}" for engine in shown))
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value) or "none"


def _line(value: object) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_flat(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list):
        return "\n".join(map(_flat, value)) or "-"
    return "-" if value is None else str(value)


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_flat(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
