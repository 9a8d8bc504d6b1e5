"""Sentences about what a request waited for, and what would have let it start sooner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ...graph.admission import AT_EASE, SATURATED
from ...graph.logs.reasons import Cause, DepartureRule, Detail, Reason
from ...graph.logs.requests import Hold
from ...graph.wire.events import HOLD_ENDS
from .times import seconds


class FirstMiss(NamedTuple):
    """A prompt's first missing block, as ``miss_remedy`` needs it."""

    reason: Reason
    detail: int  # of the reason; see `graph.logs.requests.Miss`
    block: int  # its index in the prompt, from 0
    short: int = 0  # blocks that the pool lacked to keep what was computed again; 0: unknown
    pool: int = 0  # the pool's blocks; 0: unknown
    was_there: bool = False  # evicted only after the request arrived
    copies: int = 0  # blocks that the engine's host memory and disk can hold


def miss_remedy(missing: FirstMiss) -> str | None:
    """Describe what would have let a request find more; None if unknown."""
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
    """Return whether a cache that keeps or shares more would have saved anything."""
    if reason is Reason.NOT_CACHEABLE:
        return Detail(detail) in _IN_ANY_CASE
    return reason not in (Reason.NEVER_SEEN, Reason.LOAD_SLOWER, Reason.IN_STORE)


def larger_pool(short: int, pool: int) -> str:
    """Describe the pool that would have kept the blocks computed again; 0 blocks: unknown."""
    if short == 0:
        return "a larger pool"
    if short > pool > 0:
        return (
            f"much more memory (since it left, {short / pool:.0f} times as many blocks left as the "
            "pool holds, some of them more than once; What if shows what larger pools find)"
        )
    return f"a pool larger by {'one block' if short == 1 else f'at most {short:,} blocks'}"


def host_memory(copies: int) -> str:
    if copies:
        return (
            f"more room for copies than for {copies:,} blocks (AITHER_KVCACHE_WARM_GIB, "
            "AITHER_KVCACHE_COLD_GIB)"
        )
    return "host memory for copies (AITHER_KVCACHE_WARM_GIB)"


def _kept(missing: FirstMiss) -> str:
    larger = larger_pool(missing.short, missing.pool)
    text = f"{larger}, or {_a_copy(missing.copies)}."
    if missing.was_there:
        return f"Its turn sooner: the block was there when it came. Or {text}"
    return text[0].upper() + text[1:]


def _a_copy(copies: int) -> str:
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


# Shown for an engine that sends no report on admission.
OFF: Final = "nobody waits: admission is off there (AITHER_KVCACHE_ADMISSION)"


def fit_and_live(fitting: int, live: int) -> str:
    return f"{fitting:,} agents fit, {live:,} are live"


UNTIL: Final = {  # reason of release → until when the request was held
    "room": "until there was room",
    "bound": "as long as any request may be (AITHER_KVCACHE_HOLD_MAX_S)",
    "idle": "until the engine had nothing else to do",
    "open": "until nobody had to wait for room any more",
    "silence": "until the engine heard nothing from the sidecar",
    "gone": "until its client went away",
    "patience": "until no other request was queued, although there was no room",
}


def hold_sentence(hold: Hold) -> str:
    counts = ""
    if hold.live:
        were = "was" if hold.live == 1 else "were"
        counts = f": {_fit(hold.fitting)}, {hold.live:,} {were} live when it came"
    return f"It was held for {seconds(hold.seconds)}, {UNTIL[hold.reason]}{counts}."


def room_sentence(
    # number of held requests, and seconds for which the first has been held
    now: tuple[int, float],
    sessions: tuple[int | None, int | None],  # sessions that fit, and live sessions; None: unknown
    # requests of the last ten minutes that had been held, and the longest hold in seconds
    lately: tuple[int, float],
    *,
    lifted: bool = False,  # whether the limit was lifted because it saved nothing
) -> str:
    (waiting, oldest_s), (fitting, live), (begun, longest_s) = now, sessions, lately
    text = "Nobody waits for room now"
    text += ", since letting sessions wait saved nothing" if lifted else ""
    if waiting:
        who = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
        first = "" if waiting == 1 else "the first "
        text = f"{who} for room, {first}for {seconds(oldest_s)} by now"
    if fitting is not None and live is not None:
        text += f": {_fit(fitting)}, {live:,} {'is' if live == 1 else 'are'} live"
    if not begun:
        return f"{text}."
    who = "1 request" if begun == 1 else f"{begun:,} requests"
    most = f"of {'' if begun == 1 else 'at most '}{seconds(longest_s)}"
    return f"{text}. {who} of the last 10 min began after a wait for room, {most}."


def admission_facts(engine: Mapping[str, Any]) -> dict[str, str]:
    """Return an engine's facts on admission; empty if it never holds requests."""
    room, report = engine["room"], (engine["graph"] or {}).get("admission")
    if room is None or (report is None and room["room_blocks"] is None):
        return {}
    facts = {"room": _room(room), "computed again": f"{room['again']:.0%} of the latest prompts"}
    return facts | (_held(report) if report else {"held": OFF})


def _room(room: Mapping[str, Any]) -> str:
    words = fit_and_live(room["fitting_sessions"], room["live_sessions"])
    if room["room_blocks"] is not None:
        return f"for {room['room_blocks']:,} blocks of new context: {words}"
    if room["lifted_pools"]:
        return (
            f"no limit for the next {room['lifted_pools']} pools' worth of prompts, since one "
            f"saved nothing: {words}"
        )
    return f"no limit: {words}"


def _fit(fitting: int) -> str:
    return "1 session fits" if fitting == 1 else f"{fitting:,} sessions fit"


def _held(report: Mapping[str, Any]) -> dict[str, str]:
    now = "nobody"
    if report["waiting"]:
        blocks = report["waiting_blocks"]
        now = f"{report['waiting']:,}, the first for {report['oldest_s']:.0f} s, {blocks:,} blocks"
    ends = zip(HOLD_ENDS, report["released"], strict=False)
    why = ", ".join(f"{name} {count:,}" for name, count in ends if count) or "-"
    total = report["held"] + report["not_held"]
    longest = max(report["longest_s"], report["oldest_s"])
    return {
        "held": now,
        "held so far": f"{report['held']:,} of {total:,}, {longest:.0f} s at most",
        "wait no longer": why,
        "meet a queue": f"{report['queued_share']:.0%} of the latest requests; from "
        f"{SATURATED:.0%} on new ones may wait, and then until it is below {AT_EASE:.0%}",
    }


_MUCH_AGAIN: Final = 0.25  # share of the tokens computed ahead of it; chosen
_MOSTLY: Final = 0.5  # share of a wait: if held for longer, a request waited for room; chosen
_ALL_BUT: Final = 0.1  # share of a wait: a shorter remainder is not mentioned; chosen


class WorkAhead(NamedTuple):
    """What an engine did while a request queued."""

    queued_s: float  # without the time for which it was held
    running: int  # requests that ran when it arrived
    freed_s: float | None  # until the first of these ended; None: none did before the request began
    runner: str | None  # session of the latest of these
    prompts: int  # number of prompts started in that time
    tokens: int  # computed for these prompts, or else for the last prompt begun before
    again: int  # tokens of these that had been in the engine's pool before
    short: int  # blocks that the pool lacked for the largest loss among them; 0: unknown
    pool: int  # the pool's blocks; 0: unknown
    copies: int  # blocks that the engine's host memory and disk can hold
    rate: float  # prompt tokens that the engine computes per second; 0: unknown
    who: str | None  # session of the prompt with most computed tokens
    most: int  # tokens computed for that prompt


def wait_sentence(work: WorkAhead, hold: Hold | None) -> str:
    if hold is None:
        return _work_sentence(work)
    held = hold_sentence(hold)
    if work.queued_s > _ALL_BUT * (work.queued_s + hold.seconds):
        held += f" For {seconds(work.queued_s)} it waited for its turn in the engine's queue."
    return f"{held} {_work_sentence(work)}" if work.tokens else held


def _work_sentence(work: WorkAhead) -> str:
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
    if not work.rate:
        return ""
    takes_s = work.tokens / work.rate
    rest_s = work.queued_s - takes_s - (work.freed_s or 0.0)
    rest = ""
    if rest_s > _ALL_BUT * work.queued_s:
        rest = f"; {seconds(rest_s)} more went to answers"
    return f"That takes about {seconds(takes_s)}{rest}. "


def wait_remedy(work: WorkAhead, hold: Hold | None) -> tuple[str, float | None]:
    """Return what would have let the request start sooner, and the most seconds saved, if known."""
    held_s = 0.0 if hold is None else hold.seconds
    if held_s >= _MOSTLY * (work.queued_s + held_s):
        return _ROOM, held_s
    if work.tokens > 0 and work.again >= _MUCH_AGAIN * work.tokens:
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
