"""Why a request missed, what would have helped it, and why a block left: in sentences."""

from __future__ import annotations

from typing import Final

from ...graph.logs.reasons import CAUSE_TEXTS, RULE_TEXTS, Cause, Detail, Reason, Rule
from ...graph.types import SessionState
from ..times.spoken_times import seconds

_STATES: Final = (
    "idle between turns", "running", "waiting for a tool", "over", "of no session that is known"
)  # fmt: skip


def miss_sentence(
    reason: Reason,
    detail: int,
    place: tuple[int, int],
    ago_s: float | None,
    session: str | None,
    engine: str | None,
) -> str:
    """Why a prompt's first missing block was missing.

    Args:
        detail: Of the reason; see ``graph.logs.request_log.Miss``.
        place: Which block of how many, the first being 0.
        ago_s: Seconds before the request that the block had left the pool; None: it did not.
        session: The other session that it is about.
        engine: Another engine that has it.
    """
    index, blocks = place
    if reason is Reason.NOT_CACHEABLE:
        return _not_cacheable(detail, index, blocks)
    where = f"Block {index + 1} of {blocks} "
    said = where + _WHY[reason](detail, ago_s, session)
    if engine is not None and reason is Reason.OTHER_ENGINE:
        said += f" Engine {engine} has it, and would have found it."
    elif engine is not None:
        said += f" Engine {engine} has it."
    return said


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
    return "All that can be found was found; the rest is computed in any case."


def _never_seen(detail: int, ago_s: float | None, session: str | None) -> str:
    return "was never asked for before, or longer ago than is remembered."


def _diverged(detail: int, ago_s: float | None, session: str | None) -> str:
    if detail == Detail.OWN_HISTORY:
        return (
            f"differs from what session {session} itself asked for before: its history was edited "
            "there, or its answer came back as other tokens."
        )
    return f"differs: up to there the prompt is that of session {session or '(not named)'}."


def _evicted(detail: int, ago_s: float | None, session: str | None) -> str:
    return f"{_left(ago_s)}. Why: {RULE_TEXTS[detail]}.{_whose(session)}"


def _copy_lost(detail: int, ago_s: float | None, session: str | None) -> str:
    return f"{_left(ago_s)} with a copy, and the copy is gone: {CAUSE_TEXTS[detail]}."


def _load_slower(detail: int, ago_s: float | None, session: str | None) -> str:
    return "has a copy in a colder tier, but computing it was judged faster than loading."


def _other_engine(detail: int, ago_s: float | None, session: str | None) -> str:
    if detail == Detail.ELSEWHERE:
        return "was never in this engine's pool, but in another one's, which has it no more."
    return "was never in this engine's pool."


def _reset(detail: int, ago_s: float | None, session: str | None) -> str:
    return "was in the pool until the prefix cache was reset."


def _other_salt(detail: int, ago_s: float | None, session: str | None) -> str:
    whose = f"session {session}'s prompt says" if session else "a prompt of another tenant says"
    return (
        f"is new under this cache salt, though {whose} the same up to there under another one: "
        f"salts keep tenants apart."
    )


def _unknown(detail: int, ago_s: float | None, session: str | None) -> str:
    if detail == Detail.UNHEARD:
        return "left the pool while news of its engine were lost: nobody told why."
    if detail == Detail.UNCOMPUTED:
        return "was asked for before, by a request that ended before it was computed."
    return "should have been there by the sidecar's books: the news of its eviction were lost."


_WHY: Final = {
    Reason.NEVER_SEEN: _never_seen,
    Reason.DIVERGED: _diverged,
    Reason.EVICTED: _evicted,
    Reason.OTHER_ENGINE: _other_engine,
    Reason.LOAD_SLOWER: _load_slower,
    Reason.COPY_LOST: _copy_lost,
    Reason.RESET: _reset,
    Reason.UNKNOWN: _unknown,
    Reason.OTHER_SALT: _other_salt,
}


def eviction_sentence(rule: int, place: int | None, idle_s: float | None, state: int) -> str:
    """Why a block left.

    Args:
        place: How many stood before it in the ranking; None: it was not named.
        idle_s: How long it had not been used; None: not known.
        state: What its session did: a ``SessionState``, or one more for none.
    """
    words = [RULE_TEXTS[rule]]
    if place is not None:
        words.append(f"{place} stood before it in the ranking")
    if idle_s is not None:
        words.append(f"unused for {seconds(idle_s)}")
    words.append(f"its session was {_STATES[min(state, len(SessionState))]}")
    said = ", ".join(words)
    return f"{said[0].upper()}{said[1:]}."


def _left(ago_s: float | None) -> str:
    return "left the pool" if ago_s is None else f"left the pool {seconds(ago_s)} before"


def _whose(session: str | None) -> str:
    return "" if session is None else f" It was session {session}'s."


def remedy(reason: Reason, detail: int, index: int, short: int) -> str | None:
    """What would have let a request find more; None where nobody can say.

    Args:
        detail: Of the reason; see ``graph.logs.request_log.Miss``.
        index: Which block was missing, the first being 0.
        short: By about how many blocks the pool was too small to keep it; 0: not known.
    """
    match reason:
        case Reason.NEVER_SEEN:
            return _NEW_TURN if index else _NEW_PROMPT
        case Reason.DIVERGED:
            return _UNCHANGED if detail == Detail.OWN_HISTORY else _SHARED_FIRST
        case Reason.EVICTED:
            return _kept(short) + _RULES.get(Rule(detail), "")
        case Reason.COPY_LOST:
            return _COPIES.get(Cause(detail))
        case Reason.NOT_CACHEABLE:
            return _IN_ANY_CASE.get(Detail(detail), _NOTHING_LEFT)
        case _:
            return _OTHERS.get(reason)


def _kept(short: int) -> str:
    """How much larger the pool would have had to be."""
    if short == 0:
        return "A larger pool, or host memory for copies (AITHER_KVCACHE_WARM_GIB)."
    if short == 1:
        return "A pool larger by one block would have kept it."
    return (
        f"A pool larger by about {short:,} blocks would have kept it, or host memory for as many "
        "copies (AITHER_KVCACHE_WARM_GIB): so many have left since, with it."
    )


_NEW_PROMPT: Final = (
    "No cache would have: the whole prompt is new here. If many requests begin with it, "
    "`kvgraph precache` has it computed before the first one comes."
)
_NEW_TURN: Final = (
    "No cache would have: from there on the prompt is new. Only fewer new tokens would have been "
    "faster."
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
    "Nothing in the cache: it found all that there is. If it was slow, its wait or its answer was."
)

_RULES: Final = {
    Rule.SESSION_OVER: " Or not saying that a session is over which comes back.",
    Rule.PROTECTED_LAYER: " Or protecting less: what is protected did not fit its share.",
}
_COPIES: Final = {
    Cause.ROOM: "More room for copies: AITHER_KVCACHE_WARM_GIB, AITHER_KVCACHE_COLD_GIB.",
    Cause.DAMAGED: "A disk that gives back what it took: see the engine's log.",
    Cause.RESET: "Not resetting the prefix cache: that drops all copies as well.",
    Cause.NOT_TAKEN: "A disk that takes copies: is it full, or slow? See the engine's log.",
}
_IN_ANY_CASE: Final = {
    Detail.UNDER_WAY: "Coming a moment later, when the other request had computed it.",
    Detail.READS_NONE: "Not asking for what only computing gives (such as prompt_logprobs).",
}
_OTHERS: Final = {
    Reason.OTHER_ENGINE: "Going to the engine that had it: `kvgraph route` sends requests there.",
    Reason.LOAD_SLOWER: "A faster way from the tier: computing it was the faster one.",
    Reason.RESET: "Not resetting the prefix cache: that drops all blocks of the engine.",
    Reason.OTHER_SALT: "One cache salt for callers that may share.",
}
