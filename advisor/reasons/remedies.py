"""What would have let a request find more, in sentences."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...graph.logs.reasons import Cause, DepartureRule, Detail, Reason


class Missing(NamedTuple):
    """A prompt's first missing block.

    Attributes:
        detail: Of the reason; see ``graph.logs.request_facts.Miss``.
        block: Which one it is, the first being 0.
        short: By about how many blocks the pool was too small to keep it, and what was computed
            again behind it; 0: not known.
        pool: How many blocks it has; 0: not known.
        was_there: Whether it left after the request had come.
        copies: How many blocks its engine's host memory and disk can hold.
    """

    reason: Reason
    detail: int
    block: int
    short: int = 0
    pool: int = 0
    was_there: bool = False
    copies: int = 0


def miss_remedy(missing: Missing) -> str | None:
    """What would have let a request find more; None where nobody can say."""
    detail = missing.detail
    match missing.reason:
        case Reason.NEVER_SEEN:
            return _NEW_TURN if missing.block else _NEW_PROMPT
        case Reason.DIVERGED:
            return _UNCHANGED if detail == Detail.OWN_HISTORY else _SHARED_FIRST
        case Reason.EVICTED:
            return _kept(missing) + _RULES.get(DepartureRule(detail), "")
        case Reason.COPY_LOST:
            return _COPIES.get(Cause(detail))
        case Reason.NOT_CACHEABLE:
            return _IN_ANY_CASE.get(Detail(detail), _NOTHING_LEFT)
        case _:
            return _OTHERS.get(missing.reason)


def could_find_more(reason: Reason, detail: int) -> bool:
    """Whether a cache that kept or shared more would have saved anything."""
    if reason is Reason.NOT_CACHEABLE:
        return Detail(detail) in _IN_ANY_CASE
    return reason not in (Reason.NEVER_SEEN, Reason.LOAD_SLOWER, Reason.IN_STORE)


def larger_pool(short: int, pool: int) -> str:
    """A pool that would have kept what was computed again.

    Args:
        short: How many blocks had left since the first of it did; 0: not known.
        pool: How many blocks it has; 0: not known.
    """
    if short == 0:
        return "a larger pool"
    if short > pool > 0:
        return (
            f"much more memory (since it left, {short / pool:.0f} times as many blocks left as the "
            "pool holds, some of them more than once; What if shows what larger pools find)"
        )
    return f"a pool larger by {'one block' if short == 1 else f'at most {short:,} blocks'}"


def host_memory(copies: int) -> str:
    """Room for copies, or more of it.

    Args:
        copies: Blocks that there is room for; 0: none.
    """
    if copies:
        return (
            f"more room for copies than for {copies:,} blocks (AITHER_KVCACHE_WARM_GIB, "
            "AITHER_KVCACHE_COLD_GIB)"
        )
    return "host memory for copies (AITHER_KVCACHE_WARM_GIB)"


def _kept(missing: Missing) -> str:
    """What would have kept an evicted block."""
    larger = larger_pool(missing.short, missing.pool)
    said = f"{larger}, or {_a_copy(missing.copies)}."
    if missing.was_there:
        return f"Its turn sooner: the block was there when it came. Or {said}"
    return said[0].upper() + said[1:]


def _a_copy(copies: int) -> str:
    """What would have given an evicted block a copy."""
    if not copies:
        return host_memory(copies)
    return (
        f"a copy: there is room for {copies:,} blocks, but this one was judged not to be worth a "
        "copy, or left before it was made (`kvgraph status` counts both)"
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
    "turn (a date, a shortened tool result) belongs behind them. Where turns have to go, as with "
    "`kvgraph memory`, recall brings back what then stands elsewhere (docs/recall.md)."
)
_SHARED_FIRST: Final = (
    "Nothing, if the texts have to differ there. Otherwise: what differs (a name, a date) belongs "
    "behind what both share."
)
_NOTHING_LEFT: Final = "Nothing in the cache: all that can be reused was found."

_RULES: Final = {
    DepartureRule.POLICY: " Or callers who say when they come back (waiting_for_tool, "
    "expected_return_s): the policy goes by that.",
    DepartureRule.SESSION_OVER: " Or not saying that a session is over which comes back.",
    DepartureRule.PROTECTED_LAYER: " Or protecting less: what is protected left room for nothing "
    "else.",
    DepartureRule.PROTECTED_SHARE: " Or a larger [score] protected_share or tenant_share.",
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
