"""What the graph believes of a block or a session, and how it came to: in sentences."""

from __future__ import annotations

import math

from ..tables.block_columns import DEFAULT_LAYER
from ..tables.edge_list import Edge
from ..tables.tables import Tables
from ..types import (
    LAYER_NAMES,
    NEVER,
    NO_ROW,
    Authority,
    BlockFlag,
    EdgeType,
    SessionState,
    SourceLayer,
    StopReason,
)

_WHO = {Authority.CALLER: "as a caller stated", Authority.OPERATOR: "as the operator stated"}
_READ_OFF = {
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
    """Why there is an edge, and what its weight counts."""
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
    """Sentences on a block: its layer and importance, attention, confidence, use and leases."""
    blocks = tables.blocks
    said = [
        f"It is of the layer {LAYER_NAMES[blocks.layer[row]]}, {_who_said(tables, row)}.",
        f"{int(blocks.walkers[row])} requests walked it, and {int(blocks.hit_count[row])} found it "
        "in a pool.",
    ]
    if blocks.attention[row] > 0:
        said.append(
            f"Sampled steps gave it {float(blocks.attention[row]):.1%} of their attention in the "
            "mean, which raises its importance if it is much and nobody stated it."
        )
    if blocks.confidence[row] < 1:
        said.append(
            f"Where an answer stood at this block, the model was sure by "
            f"{float(blocks.confidence[row]):.2f} of 1 in the mean."
        )
    memories = _memories(tables, row)
    if memories:
        said.append(f"It holds what is remembered as {', '.join(memories)}.")
    if blocks.flags[row] & BlockFlag.SUPERSEDED:
        said.append(
            "Its session left it behind, or an intent demoted it: it goes first until a request "
            "walks it again."
        )
    if (left := float(blocks.pinned_until[row]) - now) > 0:
        said.append(f"A lease keeps it for {left:.0f} s more.")
    if (left := float(blocks.wanted_until[row]) - now) > 0:
        said.append(f"For {left:.0f} s more, somebody waits for its copy to be brought back.")
    return said


def session_beliefs(tables: Tables, row: int, now: float) -> list[str]:
    """Sentences on a session: who named it, what it does and since when, and when it is due."""
    sessions, state = tables.sessions, int(tables.sessions.state[row])
    idle = now - float(sessions.last_seen[row])
    said = [
        "No caller named it: each of its requests goes on with the blocks of the one before."
        if sessions.inferred[row]
        else "A caller named it."
    ]
    if state == SessionState.RUNNING:
        return [*said, f"{int(sessions.running[row])} of its requests are in the engine."]
    if state == SessionState.ENDED:
        last = f"It was last heard of {idle:.0f} s ago."
        return [*said, "Somebody said that it is over, and its blocks go early.", last]
    said.append(_STOPS[StopReason(int(sessions.stop[row]))])
    if state == SessionState.WAITING_FOR_TOOL:
        tool = sessions.tools.name(int(sessions.tool[row]))
        waited = f"the tool {tool}" if tool else "a tool"
        said.append(f"It has waited for {waited} for {idle:.0f} s.")
        due, stated = float(sessions.due()[row]) - now, sessions.expected_return[row] > NEVER
        if math.isfinite(due):
            whence = "as was stated, or as the tool mostly takes" if stated else "by earlier pauses"
            when = f"is expected in {due:.0f} s" if due >= 0 else f"was expected {-due:.0f} s ago"
            said.append(f"It {when}, {whence}.")
        return said
    share = float(sessions.return_probability()[row])
    return [
        *said,
        f"It has rested for {idle:.0f} s. Of sessions with as many turns, {share:.0%} went on.",
    ]


def _who_said(tables: Tables, row: int) -> str:
    """Who said of which layer a block is."""
    blocks = tables.blocks
    authority = Authority(int(blocks.stated[row]))
    if authority is not Authority.INFERRED:
        return _WHO[authority]
    read_off = "as the engine read it off the borders of messages"
    return _READ_OFF.get(int(blocks.layer[row]), read_off)


def _memories(tables: Tables, row: int) -> list[str]:
    edges = tables.edges
    if not edges.counts[EdgeType.MEMORY_REF]:
        return []
    links = edges.of_kind(EdgeType.MEMORY_REF)
    found = edges.target[links[edges.source[links] == row]].tolist()
    return [tables.memories.name(each) or "" for each in found if each != NO_ROW]
