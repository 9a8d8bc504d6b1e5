"""Answers questions about blocks, sessions and memories; never changes the graph. Answers are plain
dicts for JSON. A block is named by its key in hexadecimal, since JavaScript cannot hold 64 bits.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from .errors import GraphError
from .ranking.copies import not_worth
from .ranking.order import RankingSources, is_under_lru, places, who_ranks
from .ranking.policy import View, terms_of
from .ranking.rules import beyond_share, is_superseded, standings
from .tables.blocks import DEFAULT_LAYER, Selection, known_depth, salt_of
from .tables.edges import Edge, EdgeStore
from .tables.sessions import MemoryFacts
from .tables.tables import Tables
from .types import (
    EDGE_NAMES,
    LAYER_NAMES,
    NEVER,
    NO_ROW,
    STATE_NAMES,
    Authority,
    BlockFlag,
    BlockKey,
    EdgeType,
    Rows,
    SessionState,
    SourceLayer,
    StopReason,
    Tier,
)

_STATED_BY = {Authority.CALLER: "as a caller stated", Authority.OPERATOR: "as the operator stated"}
_INFERRED = {
    int(DEFAULT_LAYER): "as the engine read it, or by default",
    int(SourceLayer.GENERATION): "as an answer of the model",
}
_STOPS = {
    StopReason.UNKNOWN: "Why its last answer ended is not known.",
    StopReason.TOOL_CALL: "Its last answer ended in a tool call.",
    StopReason.END_OF_TURN: "Its last answer ended a turn: somebody reads it.",
    StopReason.TRUNCATED: "Its last answer was cut at a length.",
}


def why_linked(tables: Tables, edge: Edge) -> str:
    match edge.kind:
        case EdgeType.TEMPORAL:
            return "the one follows the other in a prompt or an answer"
        case EdgeType.PREFIX_SHARE:
            return f"{edge.weight:.0f} requests went this way"
        case EdgeType.CO_ATTEND:
            half = tables.limits.co_attend_half_life_s
            return (
                f"both were among the most attended in sampled steps, {edge.weight:.1f} times as "
                f"of now (halved every {half:.0f} s)"
            )
        case EdgeType.SEMANTIC:
            return f"their keys point almost the same way, with a cosine of {edge.weight:.2f}"
        case EdgeType.SPILL_LINK:
            return "the engine copied it there"
        case EdgeType.MEMORY_REF:
            return "a request said that this block holds the memory"


def beliefs(tables: Tables, row: int, now: float) -> list[str]:
    blocks = tables.blocks
    sentences = [
        f"It is of the layer {LAYER_NAMES[blocks.layer[row]]}, {_who_stated(tables, row)}.",
        f"{int(blocks.walkers[row])} requests walked it, and {int(blocks.hit_count[row])} found it "
        "in a pool.",
    ]
    if blocks.attention[row] > 0:
        sentences.append(
            f"Sampled steps gave it {float(blocks.attention[row]):.1%} of their attention in the "
            "mean, which raises its importance if it is much and nobody stated it."
        )
    if blocks.confidence[row] < 1:
        sentences.append(
            f"Where an answer stood at this block, the model was sure by "
            f"{float(blocks.confidence[row]):.2f} of 1 in the mean."
        )
    memories = _memories(tables, row)
    if memories:
        sentences.append(f"It holds what is remembered as {', '.join(memories)}.")
    if blocks.flags[row] & BlockFlag.SUPERSEDED:
        sentences.append(
            "Its session left it behind, or an intent demoted it: it goes first until a request "
            "walks it again."
        )
    if (left := float(blocks.pinned_until[row]) - now) > 0:
        sentences.append(f"A lease keeps it for {left:.0f} s more.")
    if (left := float(blocks.wanted_until[row]) - now) > 0:
        sentences.append(f"For {left:.0f} s more, somebody waits for its copy to be brought back.")
    return sentences


def session_beliefs(tables: Tables, row: int, now: float) -> list[str]:
    sessions, state = tables.sessions, int(tables.sessions.state[row])
    idle = now - float(sessions.last_seen[row])
    sentences = [
        "No caller named it: each of its requests goes on with the blocks of the one before."
        if sessions.inferred[row]
        else "A caller named it."
    ]
    if state == SessionState.RUNNING:
        return [*sentences, f"{int(sessions.running[row])} of its requests are in the engine."]
    if state == SessionState.ENDED:
        last = f"It was last heard of {idle:.0f} s ago."
        return [*sentences, "Somebody said that it is over, and its blocks go early.", last]
    sentences.append(_STOPS[StopReason(int(sessions.stop[row]))])
    if state == SessionState.WAITING_FOR_TOOL:
        tool = sessions.tools.name(int(sessions.tool[row]))
        waited = f"the tool {tool}" if tool else "a tool"
        sentences.append(f"It has waited for {waited} for {idle:.0f} s.")
        due, stated = float(sessions.due()[row]) - now, sessions.expected_return[row] > NEVER
        if math.isfinite(due):
            whence = "as was stated, or as the tool mostly takes" if stated else "by earlier pauses"
            when = f"is expected in {due:.0f} s" if due >= 0 else f"was expected {-due:.0f} s ago"
            sentences.append(f"It {when}, {whence}.")
        return sentences
    share = float(sessions.return_probability()[row])
    return [
        *sentences,
        f"It has rested for {idle:.0f} s. Of sessions with as many turns, {share:.0%} went on.",
    ]


def _who_stated(tables: Tables, row: int) -> str:
    blocks = tables.blocks
    authority = Authority(int(blocks.stated[row]))
    if authority is not Authority.INFERRED:
        return _STATED_BY[authority]
    read_off = "as the engine read it off the borders of messages"
    return _INFERRED.get(int(blocks.layer[row]), read_off)


def _memories(tables: Tables, row: int) -> list[str]:
    edges = tables.edges
    if not edges.counts[EdgeType.MEMORY_REF]:
        return []
    links = edges.of_kind(EdgeType.MEMORY_REF)
    found = edges.target[links[edges.source[links] == row]].tolist()
    return [tables.memories.name(each) or "" for each in found if each != NO_ROW]


ROOT = "root"  # the node before every first block: the empty prefix

_TIERS = {"hot": Tier.HOT, "warm": Tier.WARM, "cold": Tier.COLD, "store": Tier.POOL}


def block_name(key: BlockKey) -> str:
    return f"{key:#018x}"


def neighbors(tables: Tables, row: int) -> list[dict[str, Any]]:
    found = []
    for edge in tables.all_edges.touching(np.array([row], dtype=np.int32)):
        outward = edge.source == row and not edge.is_from_root
        source = ROOT if edge.is_from_root else _block(tables, edge.source)
        there = _target(tables, edge) if outward else source
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


def block_attributes(tables: Tables, row: int) -> dict[str, Any]:
    """Return a block's properties that are meaningful to people."""
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


def explain(view: View, order: RankingSources, row: int) -> dict[str, Any]:
    """Return a block's score terms, its rank, and the rules that protect or demote it."""
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
        "copies": _copies(view, order, row),
        "parent": None if blocks.parent[row] == NO_ROW else _block(tables, int(blocks.parent[row])),
        "ranks": ranks,
        "edges": neighbors(tables, row),
    }


def explain_session(view: View, name: str, tenant: str | None) -> dict[str, Any]:
    """Return what a session is doing, and which blocks it holds."""
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
    """The model's mean confidence in its answers to a session; None if never sampled."""
    known = float(tables.sessions.confidence[row])
    return round(known, 4) if known >= 0 else None


def _parent(tables: Tables, row: int) -> str | None:
    parent = tables.forks.parent_of(row)
    return None if parent == NO_ROW else tables.sessions.names[parent]


def session_row(tables: Tables, name: str, tenant: str | None) -> int:
    """Return the row of a session; without ``tenant``, the session without a tenant or the only one
    of that name. Raises GraphError.
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


def _over_share_on(view: View, row: int) -> list[str]:
    """Engines on which the block loses protection because more is protected than its share."""
    engines = view.tables.engines.items()
    return [engine for engine, column in engines if row in beyond_share(view.of(column))]


def _block(tables: Tables, row: int) -> str:
    return block_name(int(tables.blocks.wire_keys(row)))


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


def _copies(view: View, order: RankingSources, row: int) -> str:
    """Where copies of a block are, or why there are none."""
    tables = view.tables
    held = _tiers(tables, row)
    copied = {engine: [tier for tier in tiers if tier != "hot"] for engine, tiers in held.items()}
    places = [f"{' and '.join(tiers)} on {engine}" for engine, tiers in copied.items() if tiers]
    if places:
        return ", ".join(places)
    copying = [column for column, reports in tables.reports.items() if reports.tiers]
    if not copying:
        return "none: no engine here keeps copies"
    found = not_worth(tables, np.array([row], dtype=np.int32), view.now)
    against = [reason.replace("_", " ") for reason, applies in found.items() if applies[0]]
    columns = [tables.engines[engine] for engine in held] or copying  # where it is, or was
    if against and not any(is_under_lru(each, order.policy, order.referee) for each in columns):
        return f"none: not worth one ({', '.join(against)})"
    return "none yet" if held else "none: worth one, and lost before it was made"


def _model(tables: Tables, row: int) -> str | None:
    salt = tables.blocks.salt[row]
    return next((name for name in tables.models.values() if name and salt_of(name) == salt), None)


def _identity(tables: Tables, row: int) -> str | None:
    name = tables.segment_names.name(int(tables.blocks.identity[row]))
    return None if name is None else f"{name}#{int(tables.blocks.chunk[row])}"


def row_of(tables: Tables, key: BlockKey) -> int:
    """Return the row of the block with this key. Among blocks of several models, it prefers one in
    a pool, then the one used last. Raises GraphError.
    """
    if not 0 <= key < 1 << 64:
        raise GraphError(f"a block key is a number from 0 to 2**64 - 1, not {key}")
    blocks = tables.blocks
    every = np.s_[: blocks.size]
    named = blocks.pick((blocks.wire_keys(every) == np.uint64(key)) & blocks.alive[every])
    if not len(named):
        raise GraphError(
            f"no block {block_name(key)} ({key}) is known: never stored, or long forgotten"
        )
    held = blocks.tiers[:, named.rows].any(axis=0)
    return int(named.rows[np.lexsort((named.last_used(), held))[-1]])


def blocks_of_memory(edges: EdgeStore, memory: int) -> Rows:
    """Return the rows of the blocks that refer to a memory, int32 ``[n]``."""
    if not edges.counts[EdgeType.MEMORY_REF]:
        return np.empty(0, dtype=np.int32)
    links = edges.of_kind(EdgeType.MEMORY_REF)
    return np.unique(edges.source[links[edges.target[links] == memory]]).astype(np.int32)


_SHOWN: Final = 16  # most blocks listed


def explain_memory(view: View, name: str) -> dict[str, Any]:
    """Return a memory's properties, and the blocks that hold it; raises GraphError."""
    tables, blocks = view.tables, view.tables.blocks
    memory = tables.memories.find(name)
    if memory == NO_ROW:
        raise GraphError("no memory of that name is known: no request's segment named it")
    rows = blocks_of_memory(tables.edges, memory)
    facts = tables.memory_facts.get(memory) or MemoryFacts(view.now)
    tiers = np.bitwise_or.reduce(blocks.tiers[:, rows], axis=0) if len(rows) else rows
    layers = np.bincount(blocks.layer[rows], minlength=len(LAYER_NAMES))
    return {
        "memory": name,
        "recalls": facts.recalls,
        "known_for_s": round(view.now - facts.first_seen, 3),
        "last_recalled_s_ago": round(view.now - facts.last_recalled, 3),
        "sessions": [tables.sessions.names[row] for row in facts.sessions if row != NO_ROW],
        "blocks": len(rows),
        "blocks_hot": int(((tiers & int(Tier.HOT)) != 0).sum()),
        "importance": round(float(blocks.importance[rows].mean()), 4) if len(rows) else None,
        "layers": {LAYER_NAMES[n]: int(layers[n]) for n in np.flatnonzero(layers)},
        "held_by": [block_name(int(key)) for key in blocks.wire_keys(rows[:_SHOWN])],
    }
