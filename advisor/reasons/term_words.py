"""What the terms of a score mean, the rules that bind all scores, and the weights: in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp
from typing import Final

from ..policies.lifecycle import SCALE
from ..times.spoken_times import seconds

_HEEDED: Final[Mapping[str, str]] = {
    "classic": "all weights below: their sum is its score",
    "lifecycle": "degree, edge weight, importance and confidence, which steer within bounds; how "
    "soon a session is expected back outweighs them",
    "lru": "none of the weights: the longest unused goes first",
}
BEYOND_SHARE: Final = "beyond_protected_share"
"""Instead of ``protected_layer``, where a block is beyond the share that is protected."""

_LONGEST_S: Final = 86_400.0  # what is expected later than that is said to be so; chosen
_TERMS: Final[Mapping[str, str]] = {
    "return_time": "how long its session is expected to take to ask again: 1,000 times the "
    "logarithm of the seconds, so 4.6K stands for 100 s, and 700 more for twice as long",
    "sharing": "what several sessions that use it take off: the more often they ask, the more",
    "graph": "what importance, edges and the model's confidence add or, below zero, take off",
    "off_chain": "4,000 for a block that the next turn of its session cannot find: behind the end "
    "of its last turn, or on a branch of its history that it left",
    "age": "seconds since it was last used, by their weight",
    "degree": "how many edges lead to or from it, by their weights",
    "edge_weight": "how strong these edges are, by their weights",
    "importance": "how important it is, by its weight",
    "confidence": "how much surer than usual the model is of its session, by its weight",
    "hit_count": "how often it was found, by its weight",
    "session_credit": "the claim of the session that used it last, by its weight",
}
_RULES: Final[Mapping[str, str]] = {
    "superseded": "only a branch of its session's history that the session left used it: it goes "
    "before all others",
    "session_over": "its session is over and nobody else used it: it goes before those that follow",
    "due": "its session waits for a tool that is about to answer: it goes after its equals",
    "reserved": "room is reserved for its session: it goes after those without",
    "pinned": "it is leased: it goes after those that are not",
    "protected_layer": "its layer is protected: it goes when nothing else is left",
    BEYOND_SHARE: "its layer is protected, but more of it is in the pool than may be kept for its "
    "price ([score] protected_price_points, or protected_share; tenant_share, inferred_share): it "
    "goes like others",
}
_WEIGHTS: Final[Mapping[str, str]] = {
    "age": "per second since a block's last use; the policy classic's alone",
    "degree": "per edge at a block, times its type's weight",
    "edge_weight": "per unit of these edges' strength, times their type's weight",
    "importance": "for the whole importance of a block",
    "confidence": "for how much surer than of other sessions the model is; where engines sample",
    "hit_count": "for each time that a block was found; the policy classic's alone",
    "session_credit": "for a session that runs or will return; the policy classic's alone",
    "session_memory_s": "seconds over which an idle session's claim fades",
    "protected_share": "of a pool: what is kept of it at most, whatever it costs",
    "protected_price_points": "points of what is found that protection and leases may cost",
    "tenant_share": "of a pool: what one named tenant's protected layers keep at most",
    "inferred_share": "of a pool: what system texts that nobody named keep at most",
    "reserved": "blocks of each pool for sessions that came back before; below 1 a share of it",
    "prefix_share": "several requests went from the one block to the other",
    "co_attend": "the model looks at both in the same steps; where engines sample",
    "semantic": "they say much the same; where engines sample",
    "temporal": "the one follows the other in a prompt",
    "spill_link": "the block has a copy in a colder tier",
    "memory_ref": "an item of an external memory names it",
}


def scored(terms: Mapping[str, float] | None) -> str | None:
    """What a block's score said of it; None if its terms are not known, or say nothing."""
    if not terms or not any(terms.values()):
        return None
    if terms.get("off_chain", 0.0) > 0:
        return "the next turn of its session could not find it"
    if not {"return_time", "sharing"} <= terms.keys():
        largest = max(terms, key=lambda name: abs(terms[name]))
        return f"the largest part of its score was its {largest.replace('_', ' ')}"
    points = terms["return_time"] + terms["sharing"]
    expected_s = exp(points / SCALE)
    if expected_s > _LONGEST_S:
        return "it was not expected to be asked for again within a day"
    return f"it was expected to be asked for again in about {seconds(expected_s)}"


def heeded(policy: str) -> str | None:
    """Which of the weights a policy heeds; None for one of somebody's own."""
    return _HEEDED.get(policy)


def weight_meanings() -> dict[str, str]:
    """What each weight of [score] and [score.edge_types] weighs."""
    return dict(_WEIGHTS)


def meanings(names: Iterable[str]) -> dict[str, str]:
    """What each of these terms and rules means; those of a policy of somebody's own have no
    text."""
    texts = {**_TERMS, **_RULES}
    return {name: texts[name] for name in names if name in texts}
