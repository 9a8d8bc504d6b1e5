"""What ``kvgraph status`` and ``kvgraph explain`` print for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType

from ..graph.messages.block_hashing import REMEDY, BlockHashing, disagreements
from .admission.wording import admission_facts
from .terminal_tables import engines_report, facts_table, layers_report


def status_report(status: Mapping[str, Any]) -> RenderableType:
    """A sidecar's ``/status`` as tables."""
    parts: list[RenderableType] = [_summary(status), engines_report(status["engines"])]
    if any(engine["graph"] for engine in status["engines"]):
        parts.append(layers_report(status["engines"]))
    if hashing := {each["name"]: each["hashing"] for each in status["engines"] if each["hashing"]}:
        parts.append(facts_report("how blocks are told apart", hashing))
    for engine in status["engines"]:
        if facts := admission_facts(engine):
            parts.append(facts_report(f"admission of {engine['name']}", facts))
    if said := _protection(status["engines"]):
        parts.append(facts_report("what is kept whatever scores say", said))
    parts += [_tiers(engine) for engine in status["engines"] if engine["tiers"]]
    return Group(*parts)


def _protection(engines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What engines keep whatever scores say, where anything is named."""
    known = {each["name"]: each["graph"] or {} for each in engines}
    return {
        name: graph["protection"]
        for name, graph in known.items()
        if graph.get("budget") is not None
    }


def hashing_warnings(engines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong where engines, also those of several sidecars, hash blocks differently."""
    told = (BlockHashing(each["name"], each["model"], each["hashing"]) for each in engines)
    return [f"{said} {REMEDY}" for said in disagreements(told)]


def facts_report(title: str, facts: Mapping[str, Any]) -> RenderableType:
    """One explained thing: one row per fact, nested ones indented below their name."""
    return facts_table(title, ((name, _line(value)) for name, value in facts.items()))


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
    if spliced := graph["counters"].get("requests_spliced"):
        facts["recall"] = (
            f"{graph['counters']['tokens_spliced']:,} tokens came back at other positions, in "
            f"{spliced:,} requests"
        )
    if snapshot["error"]:
        facts["snapshot"] = snapshot["error"]
    if status["config"]["error"]:
        facts["configuration"] = status["config"]["error"]
    title = f"kvgraph {status['version']}, process {status['pid']}, {status['http']}"
    return facts_report(title, facts)


def _tiers(engine: Mapping[str, Any]) -> RenderableType:
    """What an engine's tiers hold, what moved between them, and what was gained."""
    tiers, graph = engine["tiers"], engine["graph"]
    size, pool = tiers["bytes_per_block"], graph["pressure"] or {}
    facts = {
        "hot": _fill(graph["resident"], pool.get("total_blocks", 0), size),
        "warm": _fill(tiers["warm_blocks"], tiers["warm_capacity"], size),
        "cold": _fill(tiers["cold_blocks"], tiers["cold_capacity"], size),
        "spilled": _moved(tiers["spilled"], size, tiers["spill_bytes_per_s"]),
        "passed over": f"{tiers['passed_over']:,} evicted, and not worth a copy",
        "without a copy": f"{tiers['spill_lost']:,} lost before it was made, "
        f"{tiers['spill_failed']:,} failed, {tiers['dropped']:,} dropped for want of room",
        "brought back": _moved(
            tiers["loaded"] + tiers["prefetched"], size, tiers["load_bytes_per_s"]
        ),
        "stalls": f"{tiers['stalls']:,} requests waited {tiers['stall_s']:.2f} s in all for "
        f"{tiers['loaded']:,} blocks ({tiers['load_failed']:,} failed)",
        "computed instead": f"{tiers['recomputed']:,} blocks: judged faster than a load",
        "prefetch": _prefetch(tiers),
    }
    if tiers["reads_store"] or tiers["shared"]:
        facts["shared store"] = _store(tiers)
    return facts_report(f"tiers of {engine['name']}", facts)


def _fill(blocks: int, capacity: int, size: int) -> str:
    share = f", {100 * blocks / capacity:.0f} %" if capacity else ""
    return f"{blocks:,} of {capacity:,} blocks ({_bytes(blocks * size)}{share})"


def _moved(blocks: int, size: int, rate: float) -> str:
    return f"{blocks:,} blocks, {_bytes(blocks * size)}, at {_bytes(rate)}/s"


def _prefetch(tiers: Mapping[str, Any]) -> str:
    useful, wasted = tiers["prefetch_useful"], tiers["prefetch_wasted"]
    known = useful + wasted
    accuracy = f"{100 * useful / known:.0f} % useful ({useful:,} of {known:,})" if known else "-"
    return (
        f"{accuracy}, {tiers['prefetched']:,} blocks ahead of demand, "
        f"{tiers['prefetch_cancelled']:,} not begun for want of room"
    )


def _store(tiers: Mapping[str, Any]) -> str:
    left = "" if tiers["reads_store"] else "; left alone until the engine is started again"
    return (
        f"{tiers['shared']:,} blocks given ({tiers['share_failed']:,} failed), "
        f"{tiers['store_loaded']:,} loaded ({tiers['store_failed']:,} promised and not given){left}"
    )


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


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
