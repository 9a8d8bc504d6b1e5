"""Sentences about misses, evictions, scores and who ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp
from typing import Final, NamedTuple

from ...graph.logs.reasons import (
    CAUSE_TEXTS,
    RULE_TEXTS,
    STORE_CAUSES,
    DepartureRule,
    Detail,
    Reason,
)
from ...graph.ranking.formulas import LruPolicy
from ...graph.types import STATE_NAMES
from ...graph.wire.events import CacheGroup, GroupKind
from ..policies.lifecycle import SCALE
from .times import seconds

_A_MOMENT_S: Final = 0.01  # resolution of the eviction log
_STATES: Final = (
    "idle between turns", "running", "waiting for a tool", "over", "of no session that is known"
)  # fmt: skip


class Departure(NamedTuple):
    """How a request's missing block left the pool."""

    # Between eviction and the request's start; several steps are reported at once. None: not left.
    ago_s: float | None = None
    waited_s: float = 0.0  # wait of the request before its start
    score: str | None = None  # as text, when the block left


def miss_sentence(
    reason: Reason,
    detail: int,  # of the reason; see `graph.logs.requests.Miss`
    place: tuple[int, int],  # index of the block, from 0, and the number of blocks
    gone: Departure,
    session: str | None,  # the other session involved
    engine: str | None,  # another engine that has it
    # index, from 0, of the first prompt token that differs from another recent prompt
    token: int | None = None,
    group: CacheGroup | None = None,  # the cache group, for OTHER_GROUP; None: its engine is gone
) -> str:
    """Explain why a prompt's first missing block was missing."""
    index, blocks = place
    if reason is Reason.NOT_CACHEABLE:
        return _not_cacheable(detail, index, blocks)
    where = f"Block {index + 1} of {blocks} "
    if reason is Reason.OTHER_GROUP:
        return where + _other_group(detail, group)
    text = where + (_ALWAYS.get(reason) or _WHY[reason](detail, gone, session))
    if engine is not None and reason is Reason.OTHER_ENGINE:
        text += f" Engine {engine} has it, and would have found it."
    elif engine is not None:
        text += f" Engine {engine} has it."
    if token is not None:
        text += f" Token {token + 1:,} of the prompt is the first that differs from another one's."
    return text


def _not_cacheable(detail: int, index: int, blocks: int) -> str:
    if detail == Detail.UNDER_WAY:
        return (
            f"Block {index + 1} of {blocks} was just being computed by another request: it could "
            "not be shared yet."
        )
    if detail == Detail.READS_NONE:
        return "The request reads no cache: it asks for what only computing its prompt gives."
    if not blocks:
        return "The prompt is shorter than a block: nothing of it can be cached."
    return "Nothing was missing: all that can be reused was found; the rest is always computed."


def _diverged(detail: int, gone: Departure, session: str | None) -> str:
    if detail == Detail.OWN_HISTORY:
        return (
            f"differs from what session {session} itself asked for before: its history was edited "
            "there, or its answer came back as other tokens."
        )
    return f"differs: up to there the prompt is that of session {session or '(not named)'}."


def _evicted(detail: int, gone: Departure, session: str | None) -> str:
    if detail == DepartureRule.FORGOTTEN:
        return f"left the pool longer ago than the log reaches.{_whose(session)}"
    why = RULE_TEXTS[detail]
    if gone.score is not None and detail == DepartureRule.POLICY:  # elsewhere a rule decided
        why += f", as {gone.score}"
    return f"{_left(gone)}. Why: {why}.{_whose(session)}"


def _copy_lost(detail: int, gone: Departure, session: str | None) -> str:
    if gone.ago_s is None and detail in STORE_CAUSES:
        return f"was in the shared store, and its copy there is lost: {CAUSE_TEXTS[detail]}."
    return f"{_left(gone)} with a copy, and the copy is gone: {CAUSE_TEXTS[detail]}."


def _other_engine(detail: int, gone: Departure, session: str | None) -> str:
    if detail == Detail.ELSEWHERE:
        return "was never in this engine's pool, but in another one's, which has it no more."
    return "was never in this engine's pool."


def _other_group(place: int, group: CacheGroup | None) -> str:
    name = f"cache group {place}"
    if group is not None:
        name += f" ({_KINDS[group.kind].format(window=group.window)})"
    needs = _NEEDS[GroupKind.OTHER if group is None else group.kind]
    return f"is in the pool, but {name} had let go of {needs}."


def _other_salt(detail: int, gone: Departure, session: str | None) -> str:
    whose = f"session {session}'s prompt says" if session else "a prompt of another tenant says"
    return (
        f"is new under this cache salt, though {whose} the same up to there under another one: "
        f"salts keep tenants apart."
    )


def _unknown(detail: int, gone: Departure, session: str | None) -> str:
    if detail == Detail.UNHEARD:
        return "left the pool while news of its engine was lost: nobody told why."
    if detail == Detail.UNCOMPUTED:
        return "was asked for before, by a request that ended before it was computed."
    return (
        "should have been there by the sidecar's books: the news of its eviction was lost, or "
        "its engine matches in another way than we know."
    )


_KINDS: Final = {
    GroupKind.OTHER: "of a kind that we do not know",
    GroupKind.FULL: "full attention",
    GroupKind.WINDOW: "a sliding window of {window:,} tokens",
    GroupKind.CHUNK: "attention in chunks of {window:,} tokens",
    GroupKind.STATE: "states, as Mamba layers have",
}
_NEEDS: Final = {
    GroupKind.OTHER: "what a match up to there needs of it",
    GroupKind.FULL: "its part of it",
    GroupKind.WINDOW: "a part of the window that ends there",
    GroupKind.CHUNK: "a part of the chunk that it is in",
    GroupKind.STATE: "the state at its end, or never kept it",
}
_ALWAYS: Final = {
    Reason.NEVER_SEEN: "was never asked for before, or longer ago than is remembered.",
    Reason.LOAD_SLOWER: "has a copy in a colder tier, but computing it was judged faster than "
    "loading.",
    Reason.RESET: "was in the pool until the prefix cache was reset.",
    Reason.IN_STORE: "is in the shared store, but did not come from there: computing it was judged "
    "faster than loading, or the store did not answer in time.",
}
_WHY: Final = {
    Reason.DIVERGED: _diverged,
    Reason.EVICTED: _evicted,
    Reason.OTHER_ENGINE: _other_engine,
    Reason.COPY_LOST: _copy_lost,
    Reason.UNKNOWN: _unknown,
    Reason.OTHER_SALT: _other_salt,
}


def eviction_sentence(
    rule: int,
    place: int | None,  # blocks before it in the ranking; None: the ranking did not name it
    idle_s: float | None,  # seconds since its last use
    state: int,  # its session's `SessionState`; one above the highest: no session
    score: str | None = None,  # its score in words
) -> str:
    """Explain why a block was evicted."""
    words = [RULE_TEXTS[rule]]
    if score is not None and rule == DepartureRule.POLICY:  # elsewhere a rule decided, and no score
        words.append(score)
    if place is not None:
        before = {0: "no block was", 1: "one block was"}.get(place, f"{place:,} blocks were")
        words.append(f"{before} to go before it")
    if idle_s is not None:
        words.append(f"unused for {seconds(idle_s)}")
    if rule != DepartureRule.SESSION_OVER:
        words.append(f"its session was {_STATES[min(state, len(STATE_NAMES))]}")
    text = ", ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _left(gone: Departure) -> str:
    ago_s, waited_s = gone.ago_s, gone.waited_s
    if ago_s is None:
        return "left the pool"
    if ago_s < _A_MOMENT_S:
        return "left the pool just then"
    if ago_s < waited_s:
        return (
            f"left the pool while the request waited for its turn: {seconds(waited_s - ago_s)} "
            f"after it came, {seconds(ago_s)} before it began"
        )
    if waited_s > 0:
        return f"left the pool {seconds(ago_s - waited_s)} before the request came"
    return f"left the pool {seconds(ago_s)} before"


def _whose(session: str | None) -> str:
    return "" if session is None else f" It was session {session}'s."


LATELY: Final = "over the last requests"


def ranker(ranked_by: str) -> str:
    return "LRU" if ranked_by == LruPolicy.name else ranked_by


def beside_lru(ahead: float) -> str:
    """Describe how a policy compares with LRU, as a continuation of "it is"; ``ahead`` is the
    number of blocks found beyond LRU's.
    """
    blocks = round(abs(ahead))
    if blocks == 0:
        return "level with LRU"
    count = "1 block" if blocks == 1 else f"{blocks:,} blocks"
    return f"{count} {'ahead of' if ahead > 0 else 'behind'} LRU"


def beside_lru_lately(ahead: float) -> str:
    return f"{beside_lru(ahead)} {LATELY}"


_HEEDED: Final[Mapping[str, str]] = {
    "classic": "all weights below: their sum is its score",
    "lifecycle": "degree, edge weight, importance and confidence, which steer within bounds; how "
    "soon a session is expected back outweighs them",
    "lru": "none of the weights: the longest unused goes first",
}
# Replaces `protected_layer` for a block beyond the share that is protected.
BEYOND_SHARE: Final = "beyond_protected_share"

_LONGEST_S: Final = 86_400.0  # a later expected use is described as such; chosen
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
# Of [score] and [score.edge_types].
WEIGHT_MEANINGS: Final[Mapping[str, str]] = {
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
    """Describe a block's score; None if its terms are unknown or all zero."""
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
    """Describe which weights a policy uses; None for a custom policy."""
    return _HEEDED.get(policy)


def meanings(names: Iterable[str]) -> dict[str, str]:
    """Return the meaning of each of these terms and rules; those of a custom policy are omitted."""
    texts = {**_TERMS, **_RULES}
    return {name: texts[name] for name in names if name in texts}
