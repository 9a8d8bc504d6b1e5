"""Answers people's questions about the graph. Nothing here changes it.

Answers are plain dicts for JSON; a block is named by its key in hexadecimal, since JavaScript
cannot hold 64 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import GraphError
from ..ranking.copy_worth import not_worth
from ..ranking.places import Order, places, who_ranks
from ..ranking.policy import terms_of
from ..ranking.rules import beyond_share, is_superseded, standings
from ..ranking.view import View
from ..tables.block_columns import known_depth
from ..tables.blocks import Selection
from ..tables.edge_list import BLOCK_TO_BLOCK, Edge
from ..tables.identity import salt_of
from ..tables.tables import Tables
from ..types import (
    EDGE_NAMES,
    LAYER_NAMES,
    NEVER,
    NO_ROW,
    STATE_NAMES,
    BlockFlag,
    BlockKey,
    EdgeType,
    Rows,
    StopReason,
    Tier,
)
from .plain_words import beliefs, session_beliefs, why_linked

ROOT = "root"
"""The node before every first block: the empty prefix."""

_TIERS = {"hot": Tier.HOT, "warm": Tier.WARM, "cold": Tier.COLD, "store": Tier.POOL}


def block_name(key: BlockKey) -> str:
    """How a block is written wherever people read it."""
    return f"{key:#018x}"


def neighbors(tables: Tables, row: int) -> list[dict[str, Any]]:
    """The edges at a block row."""
    found = []
    for edge in tables.all_edges.touching(np.array([row], dtype=np.int32)):
        outward = edge.source == row and not edge.is_from_root
        there = _target(tables, edge) if outward else _source(tables, edge)
        found.append(
            {
                "node": there,
                "type": EDGE_NAMES[edge.kind],
                "direction": "out" if outward else "in",
                "weight": round(edge.weight, 6),
                "because": why_linked(tables, edge),
            }
        )
    return found


def subgraph(tables: Tables, row: int, hops: int, limit: int) -> dict[str, Any]:
    """Node-link data (networkx's shape) of what lies within ``hops`` edges of a block row."""
    rows = _within(tables, row, hops, limit)
    inside = np.zeros(tables.blocks.size, dtype=np.bool_)
    inside[rows] = True
    links, others = [], set()
    for edge in tables.all_edges.touching(rows):
        between_blocks = edge.kind in BLOCK_TO_BLOCK
        if not inside[edge.source] or (between_blocks and not inside[edge.target]):
            continue
        links.append(edge_link(tables, edge))
        if not between_blocks:
            others.add(links[-1]["target"])
        elif links[-1]["source"] == ROOT:
            others.add(ROOT)
    nodes = [block_attributes(tables, each) for each in rows.tolist()]
    nodes += [{"id": name, "kind": name.partition(":")[0]} for name in sorted(others)]
    return {"directed": True, "multigraph": True, "graph": {}, "nodes": nodes, "edges": links}


def edge_link(tables: Tables, edge: Edge) -> dict[str, Any]:
    """One edge in node-link form."""
    return {
        "source": _source(tables, edge),
        "target": _target(tables, edge),
        "key": EDGE_NAMES[edge.kind],
        "type": EDGE_NAMES[edge.kind],
        "weight": round(edge.weight, 6),
    }


def block_attributes(tables: Tables, row: int) -> dict[str, Any]:
    """The properties of one block that mean something to a person."""
    blocks, sessions = tables.blocks, tables.sessions
    session, tokens = int(blocks.session[row]), blocks.tokens[row]
    depth = int(known_depth(blocks.depth[row : row + 1])[0])
    start = depth * int(tokens)
    return {
        "id": _block(tables, row),
        "kind": "block",
        "layer": LAYER_NAMES[blocks.layer[row]],
        "depth": depth,
        "tokens": [start, start + int(tokens)],
        "importance": round(float(blocks.importance[row]), 4),
        "hits": int(blocks.hit_count[row]),
        "requests": int(blocks.walkers[row]),
        "tiers": _tiers(tables, row),
        "session": None if session == NO_ROW else sessions.names[session],
        "tenant": tables.tenants.name(int(blocks.tenant[row])),
        "model": _model(tables, row),
        "identity": _identity(tables, row),
        "shared": bool(blocks.flags[row] & BlockFlag.SHARED),
        "superseded": bool(blocks.flags[row] & BlockFlag.SUPERSEDED),
    }


def explain(view: View, order: Order, row: int) -> dict[str, Any]:
    """Every term of a block's score, its rank, and what protects it or sends it away."""
    tables, blocks, policy, now = view.tables, view.blocks, order.policy, view.now
    only = Selection(blocks, np.array([row], dtype=np.int32))
    terms = {name: float(values[0]) for name, values in terms_of(policy, view, only).items()}
    ranks = places(view, order, row)
    return {
        **block_attributes(tables, row),
        "age_s": round(now - float(only.last_used()[0]), 3),
        "confidence": round(float(blocks.confidence[row]), 4),
        "attention": round(float(blocks.attention[row]), 6),
        "policy": policy.name,
        "who_ranks": who_ranks(order, ranks),
        "believes": beliefs(tables, row, now),
        "terms": {name: round(value, 4) for name, value in terms.items()},
        "score": round(sum(terms.values()), 4),
        "standing": standings(view, only)[0],
        "over_share_on": _over_share_on(view, row),
        "copies": _copies(tables, row, now),
        "parent": None if blocks.parent[row] == NO_ROW else _block(tables, int(blocks.parent[row])),
        "ranks": ranks,
        "edges": neighbors(tables, row),
    }


def explain_session(view: View, name: str, tenant: str | None) -> dict[str, Any]:
    """What a session is doing, and which blocks it holds."""
    tables, now = view.tables, view.now
    row = session_row(tables, name, tenant)
    sessions, blocks, only = tables.sessions, tables.blocks, np.array([row], dtype=np.int32)
    mine = blocks.pick((blocks.session[: blocks.size] == row) & blocks.alive[: blocks.size])
    tiers = np.bitwise_or.reduce(blocks.tiers[:, mine.rows], axis=0)
    due = float(sessions.expected_return[row])
    tip = int(sessions.tip[row])
    return {
        "session": name,
        "tenant": tables.tenants.name(int(sessions.tenant[row])),
        "believes": session_beliefs(tables, row, now),
        "state": STATE_NAMES[sessions.state[row]],
        "turns": int(sessions.turns[row]),
        "last_stop": StopReason(int(sessions.stop[row])).name.lower(),
        "forked_from": _parent(tables, row),
        "waits_for": sessions.tools.name(int(sessions.tool[row])),
        "mean_gap_s": round(float(sessions.gap[row]), 3),
        "idle_s": round(now - float(sessions.last_seen[row]), 3),
        "expected_return_in_s": round(due - now, 3) if due > NEVER else None,
        "return_probability": round(float(sessions.return_probability()[row]), 4),
        "confidence": _confidence(tables, row),
        "credit": round(float(sessions.credit(now, view.rules.session_memory_s, only)[0]), 4),
        "blocks": len(mine),
        **{
            f"blocks_{name}": int((tiers & int(tier)).astype(bool).sum())
            for name, tier in _TIERS.items()
        },
        "blocks_superseded": int(is_superseded(view, mine).sum()),
        "tip": None if tip == NO_ROW else _block(tables, tip),
    }


def _confidence(tables: Tables, row: int) -> float | None:
    """How sure the model was of what it wrote to a session; None if that was never sampled."""
    known = float(tables.sessions.confidence[row])
    return round(known, 4) if known >= 0 else None


def _parent(tables: Tables, row: int) -> str | None:
    parent = tables.forks.parent_of(row)
    return None if parent == NO_ROW else tables.sessions.names[parent]


def session_row(tables: Tables, name: str, tenant: str | None) -> int:
    """The row of a session; without a tenant, that of no tenant, or else the only one of its name.

    Raises:
        GraphError: None is known, or several tenants have one.
    """
    if tenant is not None:
        row = tables.sessions.find(name, tables.tenants.find(tenant))
        if row == NO_ROW:
            raise GraphError(f"no session of that name is known for tenant {tenant!r}")
        return row
    rows = tables.sessions.rows_named(name)
    if not rows:
        raise GraphError("no session of that name is known: never seen, or long forgotten")
    if len(rows) > 1 and (nobodys := tables.sessions.find(name, NO_ROW)) != NO_ROW:
        return nobodys
    if len(rows) > 1:
        owners = [tables.tenants.name(int(tables.sessions.tenant[row])) for row in rows]
        raise GraphError(f"{len(rows)} tenants have a session of that name; name one of {owners}")
    return rows[0]


def _within(tables: Tables, row: int, hops: int, limit: int) -> Rows:
    """Block rows within ``hops``, nearest first, at most ``limit``."""
    seen = np.zeros(tables.blocks.size, dtype=np.bool_)
    seen[row] = True
    found = [np.array([row], dtype=np.int32)]
    total = 1
    for _ in range(hops):
        edges = tables.all_edges.touching(found[-1])
        inner = edges.where(edges.between_blocks())
        reached = np.concatenate([inner.source, inner.target])
        fresh = np.unique(reached[~seen[reached]])[: limit - total]
        if fresh.size == 0:
            break
        seen[fresh] = True
        found.append(fresh)
        total += len(fresh)
    return np.concatenate(found)


def _over_share_on(view: View, row: int) -> list[str]:
    """Engines in which more is protected than the share allows, so that this block is not."""
    engines = view.tables.engines.items()
    return [engine for engine, column in engines if row in beyond_share(view.of(column))]


def _block(tables: Tables, row: int) -> str:
    return block_name(int(tables.blocks.wire_keys(row)))


def _source(tables: Tables, edge: Edge) -> str:
    return ROOT if edge.is_from_root else _block(tables, edge.source)


def _target(tables: Tables, edge: Edge) -> str:
    node = edge.target
    if edge.kind is EdgeType.SPILL_LINK:
        return f"copy:{'cold' if node & 1 else 'warm'}:{_block(tables, node >> 1)}"
    if edge.kind is EdgeType.MEMORY_REF:
        return f"memory:{tables.memories.name(node)}"
    return _block(tables, node)


def _tiers(tables: Tables, row: int) -> dict[str, list[str]]:
    held = {}
    for engine, column in tables.engines.items():
        bits = int(tables.blocks.tiers[column, row])
        if bits:
            held[engine] = [name for name, tier in _TIERS.items() if bits & tier]
    return held


def _copies(tables: Tables, row: int, now: float) -> str:
    """Where copies of a block are, or why there is none."""
    held = _tiers(tables, row)
    copied = {engine: [tier for tier in tiers if tier != "hot"] for engine, tiers in held.items()}
    places = [f"{' and '.join(tiers)} on {engine}" for engine, tiers in copied.items() if tiers]
    if places:
        return ", ".join(places)
    found = not_worth(tables, np.array([row], dtype=np.int32), now)
    against = [reason.replace("_", " ") for reason, applies in found.items() if applies[0]]
    if against:
        return f"none: not worth one ({', '.join(against)})"
    if not any(words.tiers for words in tables.words.values()):
        return "none: no engine here keeps copies"
    return "none yet" if held else "none: worth one, and lost before it was made"


def _model(tables: Tables, row: int) -> str | None:
    """The model that computed a block, as long as an engine that runs it is here."""
    salt = tables.blocks.salt[row]
    return next((name for name in tables.models.values() if name and salt_of(name) == salt), None)


def _identity(tables: Tables, row: int) -> str | None:
    name = tables.segment_names.name(int(tables.blocks.identity[row]))
    return None if name is None else f"{name}#{int(tables.blocks.chunk[row])}"
