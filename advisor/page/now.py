"""``/v1/now``: the first screen: does it help, what is held, and what needs attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response

from ...dashboards.answer import Answer, Notice, Part
from ...dashboards.source import EngineStatus
from ...graph.logs.history import History, LoggedTables
from ...graph.types import LAYER_NAMES, STATE_NAMES
from ..words.times import Unix, seconds
from .attention import STALE_S, notices
from .engines import RoomView, rooms
from .page import Page, answered, recent
from .shadows import MOST_STEPS, lru_tokens


class TokenWindow(Part):
    """Where prompt tokens came from, over the last ``seconds``.

    ``asked`` is the sum of pool, loaded, prefetched and computed.

    Attributes:
        pool: Found in an engine's pool, left there by earlier requests.
        loaded: Loaded from a colder tier for a request that waited.
        prefetched: Found in the pool because they were loaded before any request asked.
        lru: What stock LRU would have found in a pool of the same size; None if it is not
            simulated.
        saved_s: Seconds of computation saved by cached tokens, at the measured prefill rate; None
            before one was measured.
        saved_beside_lru_s: The part of these beyond what LRU would have saved; negative if LRU
            would have saved more.
        verdict: One sentence: whether it is helping, and by how much.
    """

    seconds: float
    requests: int
    asked: int
    pool: int
    loaded: int
    prefetched: int
    computed: int
    lru: int | None
    saved_s: float | None
    saved_beside_lru_s: float | None
    verdict: str


class TokenHistory(Part):
    """The same over time, in columns, the oldest first; ``starts`` are the starts of the steps."""

    step_s: float
    starts: list[float]
    requests: list[int]
    asked: list[int]
    pool: list[int]
    loaded: list[int]
    prefetched: list[int]
    computed: list[int]
    lru: list[int | None]


class PoolView(Part):
    """What an engine's pool holds, in blocks.

    Attributes:
        blocks: How many it can hold; None if the engine never reported it.
        layers: Cached blocks by source layer, all ten of them.
        states: Cached blocks by the state of their session: running, waiting_for_tool, idle, ended,
            or none for blocks without a session.
        protected: Cached blocks protected by their layer.
        protection: What is protected whatever the scores are, and its cost, in words.
    """

    engine: str
    name: str
    blocks: int | None
    cached: int
    layers: dict[str, int]
    states: dict[str, int]
    protected: int
    protection: str


class TierFill(Part):
    """How full one tier of one engine is, in bytes of one worker."""

    engine: str
    tier: str
    blocks: int
    capacity: int
    bytes: int


class AdviceAge(Part):
    """The age of an engine's latest advice, and the policy that made it.

    Attributes:
        ranked_by: The policy's name, or ``lru`` if the guard lets the engine keep its order.
    """

    engine: str
    age_s: float | None
    epoch: int | None
    ranked_by: str


class Now(Answer):
    """Everything on the first screen.

    Attributes:
        verdict: The verdict of the longest window with any requests.
        windows: The last minute, ten minutes, hour and four hours; the newest first.
        prefill_tokens_per_s: Measured by engines; None before that.
        stale_s: With advice older than this, an engine evicts like stock vLLM.
        rooms: Engines that hold requests until there is room, did recently, or stopped because it
            saved nothing.
        attention: Problems, the most serious first.
    """

    verdict: str
    windows: list[TokenWindow]
    history: TokenHistory
    prefill_tokens_per_s: float | None
    pools: list[PoolView]
    tiers: list[TierFill]
    stale_s: float
    advice: list[AdviceAge]
    rooms: list[RoomView]
    attention: list[Notice]


WINDOWS_S: Final = (60.0, 600.0, 3600.0, 14_400.0)
_WHOLE: Final = 0.9  # share of a window that must be covered to name it; chosen
_NO_SESSION: Final = "none"
_NOTHING: Final = "No request was seen yet."
_STATES: Final = (*STATE_NAMES, _NO_SESSION)


def add_routes(paths: APIRouter, page: Page) -> None:
    @paths.get("/now", response_model=Now)
    def now() -> Response:
        return answered(now_of(page))


@recent
def now_of(page: Page) -> Now:
    status, now, tables = page.status(), page.graph.clock(), page.graph.tables
    engines = status.engines if status is not None else ()
    with page.questions.turn():
        history = tables.history
        lru, rate = lru_tokens(page.shadows, history.asked(now), now), prefill_rate(tables)
        starts, _ = history.tokens.series(now)
        known_s = now - starts[0] if starts else 0.0
        windows = [_window(history, lru, rate, each, known_s, now) for each in WINDOWS_S]
        return Now(
            at=page.unix(now),
            verdict=next((each.verdict for each in windows[::-1] if each.asked), _NOTHING),
            windows=windows,
            history=_history(history, lru, now, page.unix),
            prefill_tokens_per_s=rate,
            pools=list(_pools(tables, engines)),
            tiers=list(_tiers(engines)),
            stale_s=STALE_S,
            advice=[_advice(engine) for engine in engines if engine.kind == "hook"],
            rooms=rooms(history.requests, engines, now),
            attention=notices(tables, status, now),
        )


def prefill_rate(tables: LoggedTables) -> float | None:
    """Return the prefill speed in tokens per second, averaged over the engines that measured it."""
    known = [
        rate
        for name in tables.engines
        if (rate := tables.history.reports(name).prefill_tokens_per_s)
    ]
    return sum(known) / len(known) if known else None


def _window(
    history: History,
    lru: Mapping[float, int],
    rate: float | None,
    window_s: float,
    known_s: float,
    now: float,
) -> TokenWindow:
    sums = history.tokens.last(window_s, now)
    cached = sums["pool"] + sums["loaded"] + sums["prefetched"]
    beside = sum(found for start, found in lru.items() if start > now - window_s) if lru else None
    return TokenWindow(
        seconds=window_s,
        verdict=(
            _verdict(_stretch(window_s, known_s), sums["asked"], cached, beside)
            if sums["asked"]
            else f"No request was seen in the last {_span(window_s)}."
        ),
        computed=sums["asked"] - cached,
        lru=beside,
        saved_s=None if rate is None else round(cached / rate, 3),
        saved_beside_lru_s=(
            None if rate is None or beside is None else round((cached - beside) / rate, 3)
        ),
        **sums,
    )


def _history(history: History, lru: Mapping[float, int], now: float, unix: Unix) -> TokenHistory:
    step_s, starts, sums = history.tokens.merged(now, MOST_STEPS)
    cached = sums["pool"] + sums["loaded"] + sums["prefetched"]
    beside: dict[float, int] = {}
    for start, found in lru.items():
        step = start // step_s * step_s
        beside[step] = beside.get(step, 0) + found
    return TokenHistory(
        step_s=step_s,
        starts=[unix(start) for start in starts],
        computed=(sums["asked"] - cached).tolist(),
        lru=[beside.get(start) for start in starts],
        **{name: column.tolist() for name, column in sums.items()},
    )


def _stretch(window_s: float, known_s: float) -> str:
    """The window in words; since the first request, if that is much shorter."""
    if window_s > WINDOWS_S[0] and 0 < known_s < _WHOLE * window_s:
        return f"since the first request, {seconds(known_s)} ago,"
    return f"of the last {_span(window_s)}"


def _verdict(stretch: str, asked: int, cached: int, lru: int | None) -> str:
    """One sentence about a window; ``lru`` is the tokens that stock LRU would have found."""
    said = f"{cached / asked:.0%} of the prompt tokens {stretch} were found"
    if lru is None:
        return f"{said}; no shadow of LRU is there yet to compare with."
    ahead = (cached - lru) / asked
    if abs(ahead) < 0.005:
        return f"{said}, as many as stock LRU would have found."
    than = "more" if ahead > 0 else "fewer"
    return f"{said}, {abs(100 * ahead):.1f} points {than} than stock LRU would have found."


def _span(window_s: float) -> str:
    if window_s > 3600:
        return f"{window_s / 3600:.0f} hours"
    return {60: "minute", 3600: "hour"}.get(int(window_s), f"{window_s / 60:.0f} min")


def _pools(tables: LoggedTables, engines: tuple[EngineStatus, ...]) -> Iterator[PoolView]:
    blocks, sessions = tables.blocks, tables.sessions
    names = {engine.id: engine.name for engine in engines}
    known = {each.id: each.graph for each in engines if each.graph is not None}
    states = np.append(sessions.state[: sessions.size], np.uint8(len(STATE_NAMES)))
    for engine, column in tables.engines.items():
        rows = blocks.holding(column).rows
        layers = np.bincount(blocks.layer[rows], minlength=len(LAYER_NAMES)).tolist()
        doing = np.take(states, blocks.session[rows], mode="wrap")
        by_state = np.bincount(doing, minlength=len(_STATES)).tolist()
        yield PoolView(
            engine=engine,
            name=names.get(engine, engine),
            blocks=tables.usable_blocks(column) or None,
            cached=len(rows),
            layers=dict(zip(LAYER_NAMES, layers, strict=True)),
            states=dict(zip(_STATES, by_state, strict=True)),
            protected=stats.protected - stats.over_share if (stats := known.get(engine)) else 0,
            protection=stats.protection if stats else "",
        )


def _tiers(engines: tuple[EngineStatus, ...]) -> Iterator[TierFill]:
    for engine in engines:
        tiers = engine.tiers
        if tiers is None:
            continue
        for name in ("warm", "cold"):
            blocks = getattr(tiers, f"{name}_blocks")
            yield TierFill(
                engine=engine.id,
                tier=name,
                blocks=blocks,
                capacity=getattr(tiers, f"{name}_capacity"),
                bytes=blocks * tiers.bytes_per_block,
            )


def _advice(engine: EngineStatus) -> AdviceAge:
    return AdviceAge(
        engine=engine.id,
        age_s=engine.ranking_age_s,
        epoch=engine.ranking_epoch,
        ranked_by=engine.ranked_by,
    )
