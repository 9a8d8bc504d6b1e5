"""What a request waited for, and what would have let it begin sooner: in sentences."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...graph.logs.request_facts import Hold
from ..admission.wording import hold_sentence
from ..times.spoken_times import seconds

_MUCH_AGAIN: Final = 0.25  # share of what was computed before it; chosen
_MOSTLY: Final = 0.5  # of a wait: who was held for so much of it waited for room; chosen
_ALL_BUT: Final = 0.1  # of a wait: so little beside a hold needs no words; chosen


class WorkAhead(NamedTuple):
    """What an engine did while a request waited.

    Attributes:
        prompts: That were begun in that time.
        tokens: That were computed for these; where there were none, for the last one begun before
            that was under way.
        again: Of these tokens: how many had been in the engine's pool before.
        short: By about how many blocks the pool was too small for the largest loss among them; 0:
            not known.
        pool: How many blocks it has; 0: not known.
        who: Whose prompt took most; None: nothing was computed.
        most: Tokens that were computed for that one.
    """

    prompts: int
    tokens: int
    again: int
    short: int
    pool: int
    who: str | None
    most: int


def wait_sentence(work: WorkAhead, waited_s: float, hold: Hold | None) -> str:
    """How long a request was held, and what the engine did while it waited."""
    if hold is None:
        return _work_sentence(work)
    held = hold_sentence(hold)
    rest = waited_s - hold.seconds
    if rest > _ALL_BUT * waited_s:
        held += f" For {seconds(rest)} it waited for its turn in the engine's queue."
    return f"{held} {_work_sentence(work)}" if work.tokens else held


def _work_sentence(work: WorkAhead) -> str:
    """What the engine did while a request waited."""
    if not work.tokens:
        return (
            "While it waited, no other prompt was computed that the log remembers: the engine may "
            "have been full of answers under way."
        )
    known = ""
    if work.again:
        known = f", {_percent(work.again, work.tokens)} of which the cache had held before"
    if not work.prompts:
        return (
            f"While it waited, no other prompt was begun. The last one begun before it came was "
            f"{work.who}'s, and still under way: {work.tokens:,} tokens were computed of it{known}."
        )
    if work.prompts == 1:
        return (
            f"While it waited, the engine began one other prompt, {work.who}'s, and computed "
            f"{work.tokens:,} tokens of it{known}."
        )
    return (
        f"While it waited, the engine began {work.prompts:,} other prompts and computed "
        f"{work.tokens:,} tokens of them{known}. "
        f"The largest was {work.who}'s: {work.most:,} tokens."
    )


def wait_remedy(work: WorkAhead, waited_s: float, hold: Hold | None) -> str:
    """What would have let it begin sooner."""
    if hold is not None and hold.seconds >= _MOSTLY * waited_s:
        return (
            "Room for its context: fewer sessions at once, sessions that say when they end, a "
            "larger pool, or another engine (`kvgraph route`). AITHER_KVCACHE_HOLD_MAX_S bounds "
            "how long a request is held; with AITHER_KVCACHE_ADMISSION=0 none is, and live "
            "sessions lose what it displaces."
        )
    if work.tokens and work.again >= _MUCH_AGAIN * work.tokens:
        affordable = work.pool == 0 or work.short <= work.pool
        is_sized = work.short > 1 and affordable
        pool = f"a pool larger by about {work.short:,} blocks" if is_sized else "a larger pool"
        return (
            f"Keeping the {work.again:,} tokens that were computed again before it: {pool}, host "
            "memory for copies (AITHER_KVCACHE_WARM_GIB), or fewer sessions at once."
        )
    return (
        "Fewer requests at once, or another engine (`kvgraph route`). No cache shortens this wait: "
        "most of what was computed meanwhile was new here."
    )


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 else "less than 1 %"
