"""What a request waited for, and what would have let it begin sooner: in sentences."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...graph.logs.request_facts import Hold
from ..admission.wording import hold_sentence
from ..times.spoken_times import seconds
from .remedies import host_memory, larger_pool

_MUCH_AGAIN: Final = 0.25  # share of what was computed before it; chosen
_MOSTLY: Final = 0.5  # of a wait: who was held for so much of it waited for room; chosen
_ALL_BUT: Final = 0.1  # of a wait: what is left needs no words; chosen


class WorkAhead(NamedTuple):
    """What an engine did while a request waited for its turn.

    Attributes:
        queued_s: How long it waited, less the time for which it was held.
        running: Requests that were under way when it came.
        freed_s: How long until the first of these ended; None: none had when the request began.
        runner: Whose was begun last of them; None: nobody's.
        prompts: That were begun in that time.
        tokens: That were computed for these; where there were none, for the last one begun before
            that was under way.
        again: Of these tokens: how many had been in the engine's pool before.
        short: By about how many blocks the pool was too small for the largest loss among them; 0:
            not known.
        pool: How many blocks it has; 0: not known.
        copies: How many blocks its host memory and disk can hold.
        rate: Tokens of prompts per second that the engine computes; 0: not known.
        who: Whose prompt took most; None: nothing was computed.
        most: Tokens that were computed for that one.
    """

    queued_s: float
    running: int
    freed_s: float | None
    runner: str | None
    prompts: int
    tokens: int
    again: int
    short: int
    pool: int
    copies: int
    rate: float
    who: str | None
    most: int

    @property
    def is_much_again(self) -> bool:
        """Whether a part that counts of what was computed had been there before."""
        return self.tokens > 0 and self.again >= _MUCH_AGAIN * self.tokens


def wait_sentence(work: WorkAhead, hold: Hold | None) -> str:
    """How long a request was held, and what the engine did while it waited."""
    if hold is None:
        return _work_sentence(work)
    held = hold_sentence(hold)
    if work.queued_s > _ALL_BUT * (work.queued_s + hold.seconds):
        held += f" For {seconds(work.queued_s)} it waited for its turn in the engine's queue."
    return f"{held} {_work_sentence(work)}" if work.tokens else held


def _work_sentence(work: WorkAhead) -> str:
    """What the engine did while a request waited."""
    under_way = _under_way(work)
    if not work.tokens:
        return under_way or (
            "While it waited, no other prompt was computed that the log remembers: the engine may "
            "have been full of answers under way."
        )
    known = ""
    if work.again:
        known = f", {_percent(work.again, work.tokens)} of which the cache had held before"
    if not work.prompts:
        return (
            f"{under_way}No other prompt was begun before its turn. Of the last one that was under "
            f"way, {work.who}'s, {work.tokens:,} tokens were computed{known}."
        )
    if work.prompts == 1:
        return (
            f"{under_way}While it waited, the engine began one other prompt, {work.who}'s, and "
            f"computed {work.tokens:,} tokens of it{known}. {_time_of(work)}"
        ).rstrip()
    return (
        f"{under_way}While it waited, the engine began {work.prompts:,} other prompts and computed "
        f"{work.tokens:,} tokens of them{known}. {_time_of(work)}"
        f"The largest was {work.who}'s: {work.most:,} tokens."
    )


def _under_way(work: WorkAhead) -> str:
    """What ran when the request came."""
    if not work.running:
        return ""
    freed_s = work.freed_s
    if work.running == 1:
        ended = (
            "and still was at its turn" if freed_s is None else f"for another {seconds(freed_s)}"
        )
        return f"When it came, {work.runner}'s request was under way, {ended}. "
    ended = "none of them had ended at its turn"
    if freed_s is not None:
        ended = f"the first of them ended after {seconds(freed_s)}"
    return f"When it came, {work.running:,} requests were under way; {ended}. "


def _time_of(work: WorkAhead) -> str:
    """How long what was computed took, and where the rest of the wait went."""
    if not work.rate:
        return ""
    takes_s = work.tokens / work.rate
    rest_s = work.queued_s - takes_s - (work.freed_s or 0.0)
    rest = ""
    if rest_s > _ALL_BUT * work.queued_s:
        rest = f"; {seconds(rest_s)} more went to answers"
    return f"That takes about {seconds(takes_s)}{rest}. "


def wait_remedy(work: WorkAhead, hold: Hold | None) -> tuple[str, float | None]:
    """What would have let it begin sooner, and by how many seconds at most; None: nobody can
    tell."""
    held_s = 0.0 if hold is None else hold.seconds
    if held_s >= _MOSTLY * (work.queued_s + held_s):
        return _ROOM, held_s
    if work.is_much_again:
        saved = min(work.queued_s, work.again / work.rate) if work.rate else None
        return (
            f"Keeping the {work.again:,} tokens that were computed again before it: "
            f"{larger_pool(work.short, work.pool)}, {host_memory(work.copies)}, or fewer sessions "
            "at once."
        ), saved
    return _FEWER, work.queued_s


_ROOM: Final = (
    "Room for its context: fewer sessions at once, sessions that say when they end, a larger pool, "
    "or another engine (`kvgraph route`). AITHER_KVCACHE_HOLD_MAX_S bounds how long a request is "
    "held; with AITHER_KVCACHE_ADMISSION=0 none is, and live sessions lose what it displaces."
)
_FEWER: Final = (
    "Fewer requests at once, or another engine (`kvgraph route`). No cache shortens this wait: "
    "most of what was computed meanwhile was new here."
)


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 else "less than 1 %"
