"""One session over time: its turns, what left between them, and what it has in each tier."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby, islice, takewhile
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....dashboards.answers.graph_view import Moment
from ....dashboards.answers.log_marks import mark_of, number_in
from ....dashboards.answers.misses import RequestView
from ....dashboards.answers.session_views import Residency, SessionTimeline, SessionView, Turn
from ....graph.logs.reasons import RULE_TEXTS
from ....graph.logs.request_log import UNHEARD
from ....graph.tables.tables import Tables
from ....graph.types import NO_ROW, Tier
from ...times.unix_time import Unix
from ..logged.request_views import session_requests
from .session_list import views_of

MOST_REQUESTS: Final = 500  # shown of one session; chosen
_BEFORE_S: Final = 1e-3  # before a turn: what it did not find had left by then
_LEFT: Final = frozenset({"evicted", "copy_lost", "load_slower", "reset"})  # misses of what left


class _Gone(NamedTuple):
    """A block of the session that left, by the engine's log."""

    at: float
    engine: str
    number: int
    rule: int


class _Copies(NamedTuple):
    """How many of the session's blocks had copies: from the first time until the second, and so
    on; ``warm`` and ``cold`` have one entry more, the first: what was before."""

    times: npt.NDArray[np.float64]
    warm: npt.NDArray[np.int64]
    cold: npt.NDArray[np.int64]


def timeline(
    tables: Tables, row: int, explained: dict[str, Any], now: float, unix: Unix, after: str
) -> SessionTimeline:
    """One session: its turns, what left between them, and what it missed.

    Args:
        after: Only from the turn of this mark on, if the log still has it.
    """
    log = tables.history.requests
    known = number_in(after, log.name)
    requests = _requests(tables, row, unix, known)
    is_part = known is not None and bool(requests) and requests[0].id == known
    begin = requests[0].at if is_part else -inf
    gone = _gone(tables, row, begin, unix)
    view, turns = views_of(tables, [row], now)[0], _turns(requests)
    return SessionTimeline(
        at=unix(now),
        session=view,
        explain=explained,
        turns=turns,
        residency=_residency(requests, gone, _copies(tables, row, view, unix), view, unix(now)),
        moments=_moments(requests, turns, gone),
        since=known if is_part else None,
        mark=_mark(log.name, requests),
    )


def _mark(log: str, requests: list[RequestView]) -> str | None:
    """The mark of the last turn before the first one that may still change."""
    over = list(takewhile(lambda each: not each.is_awaited, requests))
    return mark_of(log, over[-1].id) if over else None


def _requests(tables: Tables, row: int, unix: Unix, after: int | None) -> list[RequestView]:
    """A session's, the oldest first: those from ``after`` on if that is one of them, else all."""
    name = tables.sessions.names[row]
    tenant = tables.tenants.name(int(tables.sessions.tenant[row]))
    found = []
    for each in islice(session_requests(tables.history, name, tenant, unix), MOST_REQUESTS):
        found.append(each)
        if each.id == after:
            break
    return found[::-1]


def _turns(requests: list[RequestView]) -> list[Turn]:
    following = [each.arrived for each in requests[1:]]
    return [
        Turn(
            request=each.id,
            at=each.at,
            waited_s=each.waited_s,
            ended_at=each.at if each.finished == UNHEARD else each.ended_at,
            prompt_tokens=each.prompt_tokens,
            found_blocks=each.blocks.asked - each.blocks.computed,
            computed_blocks=each.blocks.computed,
            pause_s=_pause(each, following[place] if place < len(following) else None),
            expected_pause_s=each.expected_pause_s,
        )
        for place, each in enumerate(requests)
    ]


def _pause(turn: RequestView, following: float | None) -> float | None:
    if following is None or turn.ended_at is None:
        return None
    return max(0.0, round(following - turn.ended_at, 3))


def _gone(tables: Tables, session: int, begin: float, unix: Unix) -> list[_Gone]:
    """Evictions, from a time on, of what is the session's by now, the oldest first."""
    blocks, found = tables.blocks, list[_Gone]()
    for engine, column in tables.engines.items():
        log = tables.history.evictions.get(column)
        if log is None:
            continue
        numbers, keys = log.keys_since(begin - unix(0.0))
        rows = blocks.find(keys)
        mine = (rows != NO_ROW) & (
            np.where(rows == NO_ROW, NO_ROW, blocks.session[rows]) == session
        )
        left = numbers[mine]
        for number, rule in zip(left.tolist(), log.rules(left).tolist(), strict=True):
            found.append(_Gone(unix(log.at(number)), engine, number, rule))
    return sorted(found)


def _copies(tables: Tables, session: int, view: SessionView, unix: Unix) -> _Copies:
    """Copies of what is the session's by now: those of now, less what changed since."""
    blocks, changes = tables.blocks, tables.history.copies.changes()
    rows = blocks.find(changes["key"])
    owner = np.where(rows == NO_ROW, NO_ROW, blocks.session[rows])
    mine = changes[(rows != NO_ROW) & (owner == session)]
    counts = []
    for tier, held in ((Tier.WARM, view.warm), (Tier.COLD, view.cold)):
        signs = np.where(mine["tier"] == int(tier), mine["sign"], 0).astype(np.int64)
        so_far = np.concatenate([[0], np.cumsum(signs)])
        counts.append(np.maximum(0, held - signs.sum() + so_far))
    return _Copies(mine["at"] + unix(0.0), *counts)


def _residency(
    requests: list[RequestView], gone: list[_Gone], copies: _Copies, view: SessionView, now: float
) -> Residency:
    """Its blocks by tier: in the pool all of a prompt's after each turn, and fewer with each that
    left; with copies as many as the log of copies tells. The last entry is what holds now."""
    held_now = view.chain_pool if view.chain else view.pool
    pool = [*_in_pool(requests, gone, now), (now, held_now)]
    begin = pool[0][0]
    copied = copies.times[(begin < copies.times) & (copies.times < now)]
    times = np.unique(np.concatenate([[at for at, _ in pool], copied]))
    held = _last_by(times, np.array([at for at, _ in pool]), np.array([count for _, count in pool]))
    place = np.searchsorted(copies.times, times, side="right")  # changes of copies by then
    return Residency(
        starts=times.tolist(),
        pool=held.tolist(),
        warm=copies.warm[place].tolist(),
        cold=copies.cold[place].tolist(),
    )


def _last_by(
    times: npt.NDArray[np.float64], known_at: npt.NDArray[np.float64], known: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The last of what was known, the oldest first, at each time; something was by the first."""
    found: npt.NDArray[np.int64] = known[np.searchsorted(known_at, times, side="right") - 1]
    return found


def _in_pool(
    requests: list[RequestView], gone: list[_Gone], now: float
) -> Iterator[tuple[float, int]]:
    """When the number of its blocks in the pool changed, and to what.

    Of evictions that the log has forgotten only the next turn knows: they count from its arrival
    on.
    """
    times = [each.at for each in gone]
    for place, turn in enumerate(requests, 1):
        following = requests[place] if place < len(requests) else None
        end = now if following is None else following.at
        pool = turn.blocks.asked
        yield turn.at, pool
        here = gone[bisect_left(times, turn.at) : bisect_left(times, end)]
        for at, left in groupby(here, key=lambda g: g.at):
            pool = max(0, pool - len(list(left)))
            yield at, pool
        found = pool if following is None else _still_there(following, pool)
        if following is not None and found < pool:
            yield max(turn.at, min(following.arrived, end - _BEFORE_S)), found


def _still_there(turn: RequestView, at_most: int) -> int:
    """How many blocks of the turn before were still in the pool, as far as this one can tell."""
    if turn.miss is None or turn.miss.reason not in _LEFT:
        return at_most
    return min(at_most, turn.blocks.pool + turn.blocks.prefetched)


def _moments(requests: list[RequestView], turns: list[Turn], gone: list[_Gone]) -> list[Moment]:
    """What happened, the newest first."""
    moments = [each for turn in requests for each in _of_turn(turn)]
    for request, turn in zip(requests, turns, strict=True):
        if turn.ended_at is not None and turn.pause_s is not None:
            moments.append(_pause_moment(request, turn.ended_at, turn.pause_s))
    for (at, engine, rule), left in groupby(gone, key=lambda g: (g.at, g.engine, g.rule)):
        together = list(left)
        moments.append(
            Moment(
                at=at,
                what="eviction",
                sentence=f"{len(together)} of its blocks left the pool; {RULE_TEXTS[rule]}.",
                engine=engine,
                request=None,
                eviction=together[-1].number,
                blocks=len(together),
            )
        )
    return sorted(moments, key=lambda moment: -moment.at)


def _of_turn(turn: RequestView) -> list[Moment]:
    found = turn.blocks.asked - turn.blocks.computed
    said = f"{turn.prompt_tokens:,} tokens: {found} of {turn.blocks.asked} blocks were found."
    moments = [_moment(turn, "turn", said, turn.blocks.asked)]
    for what, count in (("load", turn.blocks.loaded), ("prefetch", turn.blocks.prefetched)):
        if count:
            moments.append(_moment(turn, what, f"{count} of them by a {what}.", count))
    if turn.miss is not None and turn.miss.reason != "not_cacheable":
        moments.append(_moment(turn, "miss", turn.miss.sentence, turn.blocks.computed))
    return moments


def _moment(turn: RequestView, what: str, sentence: str, blocks: int) -> Moment:
    return Moment(
        at=turn.at,
        what=what,
        sentence=sentence,
        engine=turn.engine,
        request=turn.id,
        eviction=turn.miss.eviction if what == "miss" and turn.miss is not None else None,
        blocks=blocks,
    )


def _as_expected(turn: RequestView) -> str:
    """Whether its pause was expected, and as how long."""
    expected = turn.expected_pause_s
    return "" if expected is None else f"; {expected:.1f} s were expected"


def _pause_moment(before: RequestView, at: float, pause_s: float) -> Moment:
    return Moment(
        at=at,
        what="pause",
        sentence=(
            f"It paused for {pause_s:.1f} s{_as_expected(before)}."
            if pause_s
            else "Its next turn came before this one had ended."
        ),
        engine=before.engine,
        request=before.id,
        eviction=None,
        blocks=None,
    )
