"""What would have let a request find more, in sentences."""

from __future__ import annotations

from typing import Final

from ...graph.logs.reasons import Cause, Detail, Reason, Rule


def remedy(reason: Reason, detail: int, index: int, short: int, pool: int) -> str | None:
    """What would have let a request find more; None where nobody can say.

    Args:
        detail: Of the reason; see ``graph.logs.request_facts.Miss``.
        index: Which block was missing, the first being 0.
        short: By about how many blocks the pool was too small to keep it, and what was computed
            again behind it; 0: not known.
        pool: How many blocks it has; 0: not known.
    """
    match reason:
        case Reason.NEVER_SEEN:
            return _NEW_TURN if index else _NEW_PROMPT
        case Reason.DIVERGED:
            return _UNCHANGED if detail == Detail.OWN_HISTORY else _SHARED_FIRST
        case Reason.EVICTED:
            return _kept(short, pool) + _RULES.get(Rule(detail), "")
        case Reason.COPY_LOST:
            return _COPIES.get(Cause(detail))
        case Reason.NOT_CACHEABLE:
            return _IN_ANY_CASE.get(Detail(detail), _NOTHING_LEFT)
        case _:
            return _OTHERS.get(reason)


def _kept(short: int, pool: int) -> str:
    """How much larger the pool would have had to be."""
    if short > pool > 0:
        return (
            f"Only much more memory, so long had it been unused: a pool {1 + short / pool:.0f} "
            "times as large, or host memory for as many copies (AITHER_KVCACHE_WARM_GIB). What if "
            "shows what less would find."
        )
    if short == 0:
        return "A larger pool, or host memory for copies (AITHER_KVCACHE_WARM_GIB)."
    if short == 1:
        return "A pool larger by one block would have kept it."
    return (
        f"A pool larger by about {short:,} blocks would have kept all that was computed again, or "
        "host memory for as many copies (AITHER_KVCACHE_WARM_GIB)."
    )


_NEW_PROMPT: Final = (
    "No cache would have helped: the whole prompt is new here. If many requests begin with it, "
    "`kvgraph precache` has it computed before the first one comes."
)
_NEW_TURN: Final = (
    "No cache would have helped: from there on the prompt is new. Only fewer new tokens would have "
    "been computed sooner."
)
_UNCHANGED: Final = (
    "Sending the earlier turns as they were, and adding to their end: what changes from turn to "
    "turn (a date, a shortened tool result) belongs behind them."
)
_SHARED_FIRST: Final = (
    "Nothing, if the texts have to differ there. Otherwise: what differs (a name, a date) belongs "
    "behind what both share."
)
_NOTHING_LEFT: Final = (
    "Nothing in the cache: all that can be reused was found. Look at its wait and its answer."
)

_RULES: Final = {
    Rule.SESSION_OVER: " Or not saying that a session is over which comes back.",
    Rule.PROTECTED_LAYER: " Or protecting less: what is protected left room for nothing else.",
    Rule.PROTECTED_SHARE: " Or a larger [score] protected_share or tenant_share.",
}
_COPIES: Final = {
    Cause.ROOM: "More room for copies: AITHER_KVCACHE_WARM_GIB, AITHER_KVCACHE_COLD_GIB.",
    Cause.DAMAGED: "A disk that gives back what it took: see the engine's log.",
    Cause.RESET: "Not resetting the prefix cache: that drops all copies as well.",
    Cause.STORE_GONE: "More room in the shared store (AITHER_KVCACHE_STORE_GIB); what is in "
    "Mooncake's goes with the process that holds it, too.",
    Cause.STORE_BROKE: "A shared store that gives back what it took: see the engine's log.",
    Cause.NOT_TAKEN: "A disk that takes copies: is it full, or slow? See the engine's log.",
}
_IN_ANY_CASE: Final = {
    Detail.UNDER_WAY: "Coming a moment later, when the other request had computed it.",
    Detail.READS_NONE: "Not asking for what only computing gives (such as prompt_logprobs).",
}
_OTHERS: Final = {
    Reason.OTHER_ENGINE: "Going to the engine that had it: `kvgraph route` sends requests there. "
    "Or a store that engines share (AITHER_KVCACHE_STORE).",
    Reason.LOAD_SLOWER: "Nothing to fix unless the disk or host link should be faster: computing "
    "took less time than loading would have.",
    Reason.RESET: "Not resetting the prefix cache: that drops all blocks of the engine.",
    Reason.IN_STORE: "Nothing to fix unless the way to the shared store should be faster: "
    "computing took less time than loading would have.",
    Reason.OTHER_GROUP: "A larger pool. Layers of a sliding window or a state keep what a match "
    "needs at the end of each earlier prompt and answer, and let go of the rest first: what goes "
    "on from such an end finds it longest.",
    Reason.OTHER_SALT: "One cache salt for callers that may share.",
}
