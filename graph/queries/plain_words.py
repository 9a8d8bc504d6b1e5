"""What the graph believes of a block, and how it came to: in sentences."""

from __future__ import annotations

from ..tables.edge_list import Edge
from ..tables.tables import Tables
from ..types import LAYER_NAMES, NO_ROW, Authority, EdgeType

_WHO = {
    Authority.INFERRED: "as the engine read it off the tokens, or as nobody said otherwise",
    Authority.CALLER: "as a caller stated",
    Authority.OPERATOR: "as the operator stated",
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


def beliefs(tables: Tables, row: int) -> list[str]:
    """Sentences on a block: its layer and importance, attention, confidence, and use."""
    blocks = tables.blocks
    who = _WHO[Authority(int(blocks.stated[row]))]
    said = [
        f"It is of the layer {LAYER_NAMES[blocks.layer[row]]}, {who}.",
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
    return said


def _memories(tables: Tables, row: int) -> list[str]:
    edges = tables.edges
    if not edges.counts[EdgeType.MEMORY_REF]:
        return []
    links = edges.of_kind(EdgeType.MEMORY_REF)
    found = edges.target[links[edges.source[links] == row]].tolist()
    return [tables.memories.name(each) or "" for each in found if each != NO_ROW]
