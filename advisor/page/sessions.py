"""``/v1/sessions`` and ``/v1/sessions/NAME``: all sessions, and one of them over time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby, islice, takewhile
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from fastapi.responses import Response

from ...dashboards.answer import Answer, Part, mark_of, number_in
from ...graph.explain import session_row
from ...graph.logs.history import LoggedTables
from ...graph.logs.reasons import RULE_TEXTS
from ...graph.logs.requests import UNHEARD
from ...graph.stats import held_chains, shared_chains
from ...graph.types import NEVER, NO_ROW, STATE_NAMES, Tier
from ..words.times import Unix
from .graph import Moment, moment
from .misses import RequestView, session_requests
from .page import MarkQuery, NameParam, NameQuery, Page, RecordsQuery, answered, recent


class SessionView(Part):
    """One session.

    Attributes:
        state: ``idle``, ``running``, ``waiting_for_tool``, ``ended``.
        inferred: Whether it was inferred from its blocks, since no request named it.
        tokens: Tokens of its last prompt, and of the answer once that is known.
        pool, warm, cold: Blocks in each tier of any engine.
        engine: The engine of its last request.
        chain: Blocks of its last request, from the prompt's start; 0 if unknown.
        chain_pool: How many of these, from the start, are in that engine's pool.
        chain_copied: How many of these, from the start, are there or in that engine's other tiers.
        chain_shared: How many of these, from the start, are in a store that engines share.
    """

    session: str
    tenant: str | None
    state: str
    inferred: bool
    turns: int
    tokens: int
    idle_s: float
    mean_pause_s: float
    waits_for: str | None
    expected_return_in_s: float | None
    return_probability: float
    pool: int
    warm: int
    cold: int
    blocks: int
    engine: str | None
    chain: int
    chain_pool: int
    chain_copied: int
    chain_shared: int


class Sessions(Answer):
    """Sessions, those active last first; ``known`` is their total number, ``states`` counts them by
    state.
    """

    sessions: list[SessionView]
    known: int
    states: dict[str, int]


class Turn(Part):
    """One turn: when it was scheduled and ended, and the pause that followed.

    Attributes:
        waited_s: Seconds from its arrival until ``at``; 0 if the engine does not report it.
        ended_at: None while it runs; its start, if no end was reported.
        pause_s: Seconds until the next turn arrived; None: there was none yet.
        expected_pause_s: The pause expected when the turn ended; None if none was announced.
        found_blocks: Blocks of its prompt that were found.
    """

    request: int
    at: float
    waited_s: float
    ended_at: float | None
    prompt_tokens: int
    found_blocks: int
    computed_blocks: int
    pause_s: float | None
    expected_pause_s: float | None


class Residency(Part):
    """Blocks of the session by tier over time, the oldest first."""

    starts: list[float]
    pool: list[int]
    warm: list[int]  # blocks with a copy there, whether in the pool or not
    cold: list[int]


class SessionTimeline(Answer):
    """One session: ``explain`` is the content of ``/sessions/NAME/explain``.

    ``moments`` are the newest first; ``turns`` the oldest first.

    Attributes:
        since: The request of the given mark: turns, moments and residency start with it. None: they
            are complete.
        mark: Pass it as ``after`` to get later data; None while no turn has ended.
    """

    session: SessionView
    explain: dict[str, Any]
    turns: list[Turn]
    residency: Residency
    moments: list[Moment]
    since: int | None
    mark: str | None


def add_routes(paths: APIRouter, page: Page) -> None:
    @paths.get("/sessions", response_model=Sessions)
    def sessions(limit: RecordsQuery = 200, search: NameQuery = None) -> Response:
        return answered(sessions_of(page, limit, search or ""))

    @paths.get("/sessions/{name:anything}", response_model=SessionTimeline)
    def session(name: NameParam, tenant: NameQuery = None, after: MarkQuery = "") -> Response:
        return answered(session_of(page, name, tenant, after))


@recent
def sessions_of(page: Page, limit: int, search: str = "") -> Sessions:
    """Return sessions whose name or tenant contains ``search``, the most recent first."""
    tables = page.graph.tables
    sessions = tables.sessions
    with page.questions.turn():
        now = page.graph.clock()
        newest = np.argsort(-sessions.last_seen[: sessions.size], kind="stable").tolist()
        rows = [row for row in newest if not search or _matches(tables, row, search)][:limit]
        states = np.bincount(sessions.state[: sessions.size], minlength=len(STATE_NAMES)).tolist()
        return Sessions(
            at=page.unix(now),
            sessions=views_of(tables, rows, now),
            known=len(sessions),
            states=dict(zip(STATE_NAMES, states, strict=True)),
        )


def _matches(tables: LoggedTables, row: int, search: str) -> bool:
    tenant = tables.tenants.name(int(tables.sessions.tenant[row])) or ""
    return search.lower() in f"{tables.sessions.names[row]}\n{tenant}".lower()


def views_of(tables: LoggedTables, rows: list[int], now: float) -> list[SessionView]:
    sessions, blocks = tables.sessions, tables.blocks
    returns = sessions.return_probability()
    live = blocks.live_rows()
    owner, tiers = blocks.session[live], np.bitwise_or.reduce(blocks.tiers[:, live], axis=0)
    size = sessions.size
    held = {
        tier: np.bincount(owner[(owner != NO_ROW) & ((tiers & int(tier)) != 0)], minlength=size)
        for tier in (Tier.HOT, Tier.WARM, Tier.COLD)
    }
    blocks_of = np.bincount(owner[owner != NO_ROW], minlength=size)
    names = {column: name for name, column in tables.engines.items()}
    found = []
    for row, chain in zip(rows, _chains(tables, rows), strict=True):
        due = float(sessions.expected_return[row])
        found.append(
            SessionView(
                session=sessions.names[row],
                tenant=tables.tenants.name(int(sessions.tenant[row])),
                state=STATE_NAMES[sessions.state[row]],
                inferred=bool(sessions.inferred[row]),
                turns=int(sessions.turns[row]),
                tokens=int(sessions.tokens[row]),
                idle_s=round(now - float(sessions.last_seen[row]), 3),
                mean_pause_s=round(float(sessions.gap[row]), 3),
                waits_for=sessions.tools.name(int(sessions.tool[row])),
                expected_return_in_s=round(due - now, 3) if due > NEVER else None,
                return_probability=round(float(returns[row]), 4),
                pool=int(held[Tier.HOT][row]),
                warm=int(held[Tier.WARM][row]),
                cold=int(held[Tier.COLD][row]),
                blocks=int(blocks_of[row]),
                engine=names.get(int(sessions.engine[row])),
                **chain,
            )
        )
    return found


def _chains(tables: LoggedTables, rows: list[int]) -> list[dict[str, int]]:
    """What each session's engine still has of its last request, as fields of ``SessionView``."""
    sessions, chosen = tables.sessions, np.array(rows, dtype=np.int64)
    tips = sessions.tip[chosen]
    found = (*held_chains(tables, tips, sessions.engine[chosen]), shared_chains(tables, tips))
    columns = (column.tolist() for column in found)
    names = ("chain", "chain_pool", "chain_copied", "chain_shared")
    return [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]


# One session over time: its turns, the evictions between them, and its blocks by tier.

MOST_REQUESTS: Final = 500  # requests shown of one session; chosen
_BEFORE_S: Final = 1e-3  # before a turn: blocks that it missed had been evicted by then
_LEFT: Final = frozenset({"evicted", "copy_lost", "load_slower", "reset"})  # the block had left


class _Eviction(NamedTuple):
    at: float
    engine: str
    number: int
    rule: int


class _Copies(NamedTuple):
    # Of the session's blocks after each change; `warm` and `cold` start with earlier copies.
    times: npt.NDArray[np.float64]
    warm: npt.NDArray[np.int64]
    cold: npt.NDArray[np.int64]


def session_of(page: Page, name: str, tenant: str | None, after: str = "") -> SessionTimeline:
    """Return a session over time, from the turn of the mark ``after`` on if it is logged."""
    with page.questions.turn():
        explained = page.graph.explain_session(name, tenant)
        row = session_row(page.graph.tables, name, tenant)
        return _timeline(page.graph.tables, row, explained, page.graph.clock(), page.unix, after)


def _timeline(
    tables: LoggedTables, row: int, explained: dict[str, Any], now: float, unix: Unix, after: str
) -> SessionTimeline:
    log = tables.history.requests
    known = number_in(after, log.name)
    requests = _requests(tables, row, unix, known)
    is_part = known is not None and bool(requests) and requests[0].id == known
    begin = requests[0].at if is_part else -inf
    gone = _own_evictions(tables, row, begin, unix)
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
    # That of the last turn before the first one that may still change.
    over = list(takewhile(lambda each: not each.is_awaited, requests))
    return mark_of(log, over[-1].id) if over else None


def _requests(tables: LoggedTables, row: int, unix: Unix, after: int | None) -> list[RequestView]:
    """A session's requests, the oldest first; from ``after`` on if that is one of them."""
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


def _own_evictions(tables: LoggedTables, session: int, begin: float, unix: Unix) -> list[_Eviction]:
    """Evictions since ``begin`` of blocks that the session owns now, the oldest first."""
    blocks, found = tables.blocks, list[_Eviction]()
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
            found.append(_Eviction(unix(log.at(number)), engine, number, rule))
    return sorted(found)


def _copies(tables: LoggedTables, session: int, view: SessionView, unix: Unix) -> _Copies:
    """Copies of the blocks that the session owns now, counted back from the present."""
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
    requests: list[RequestView],
    gone: list[_Eviction],
    copies: _Copies,
    view: SessionView,
    now: float,
) -> Residency:
    # The pool has all of a prompt after each turn, and loses each eviction.
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
    """The last known value at each time; there is one at the first."""
    found: npt.NDArray[np.int64] = known[np.searchsorted(known_at, times, side="right") - 1]
    return found


def _in_pool(
    requests: list[RequestView], gone: list[_Eviction], now: float
) -> Iterator[tuple[float, int]]:
    """When the number of its blocks in the pool changed, and to what."""
    # The next turn reveals evictions that the log has forgotten: they count from its arrival on.
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
        found = pool if following is None else _still_in_pool(following, pool)
        if following is not None and found < pool:
            yield max(turn.at, min(following.arrived, end - _BEFORE_S)), found


def _still_in_pool(turn: RequestView, at_most: int) -> int:
    """How many blocks of the previous turn were still in the pool, judging by this one."""
    if turn.miss is None or turn.miss.reason not in _LEFT:
        return at_most
    return min(at_most, turn.blocks.pool + turn.blocks.prefetched)


def _moments(requests: list[RequestView], turns: list[Turn], gone: list[_Eviction]) -> list[Moment]:
    moments = [each for turn in requests for each in _turn_moments(turn)]
    for request, turn in zip(requests, turns, strict=True):
        if turn.ended_at is not None and turn.pause_s is not None:
            moments.append(_pause_moment(request, turn.ended_at, turn.pause_s))
    for (at, engine, rule), left in groupby(gone, key=lambda g: (g.at, g.engine, g.rule)):
        together = list(left)
        moments.append(
            moment(
                at,
                "eviction",
                f"{len(together)} of its blocks left the pool; {RULE_TEXTS[rule]}.",
                engine,
                eviction=together[-1].number,
                blocks=len(together),
            )
        )
    return sorted(moments, key=lambda each: -each.at)


def _turn_moments(turn: RequestView) -> list[Moment]:
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
    left = turn.miss.eviction if what == "miss" and turn.miss is not None else None
    return moment(
        turn.at, what, sentence, turn.engine, request=turn.id, eviction=left, blocks=blocks
    )


def _pause_moment(before: RequestView, at: float, pause_s: float) -> Moment:
    expected = before.expected_pause_s
    as_expected = "" if expected is None else f"; {expected:.1f} s were expected"
    sentence = "Its next turn came before this one had ended."
    if pause_s:
        sentence = f"It paused for {pause_s:.1f} s{as_expected}."
    return moment(at, "pause", sentence, before.engine, request=before.id)
