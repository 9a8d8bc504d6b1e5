"""``/v1/shadows``: what other policies, sizes and weights would have found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response

from ...dashboards.answer import Answer, Part
from ..shadows.ceiling import Ceiling, FoundOf
from ..shadows.pools import LruPool, OtherWeights, PolicyPool
from ..shadows.runner import STEP_S, ShadowRunner, ShadowSet
from .page import NameQuery, Page, answered, chosen_engine
from .ranking import who_ranks

Sums = Mapping[str, np.ndarray]  # name of a count → its value in each step, the oldest first

MOST_STEPS: Final = 360  # steps of a history that are shown; chosen
_OURS: Final = "the live engine: what its requests found in its pool, or loaded from its tiers"
_AS_TIERS: Final = 2.0  # size factor of a pool that equals the pool plus host memory of its size
_BELADY: Final = (
    "the ceiling at today's size{copies}: what would have been found by whoever knows the future; "
    "all shares are of the requests that are remembered, and worked out at most once a minute "
    "while somebody looks"
)
_NO_BELADY: Final = (
    "the ceiling at today's size: what would have been found by whoever knows the future; it is "
    "not shown while it is worked out, while other weights are tried, or of too few requests"
)
_UNKNOWN: Final = FoundOf(0, 0)


class ShadowView(Part):
    """What a pool would have found under another policy or size, for the same requests.

    Attributes:
        name: Its name; ``ours`` is the live pool, ``belady`` the upper bound.
        sentence: The same in words.
        policy: The policy that ranks there.
        capacity: Its size beside the live pool's: 1.0, 0.75, 1.25 or 2.0, or with tiers.
        tiers: Whether copies in colder tiers count: as so many blocks more. ``ours`` has what the
            engine has.
        blocks: Its size, of the whole pool.
        asked, found: Blocks of the requests: of those that the ceiling is of, while that is known,
            and else of all.
        hit_rate: The hit rate of all these requests; None before any. The ceiling's is never below
            that of a pool with no more room.
        ours: What the live engine found of the same requests, in its pool or loaded from its tiers.
        history: Hit rates by step, the oldest first; None where nothing was asked.
    """

    name: str
    sentence: str
    policy: str
    capacity: float
    tiers: bool
    blocks: int
    asked: int
    found: int
    hit_rate: float | None
    ours: float | None
    history: list[float | None]


class Shadows(Answer):
    """One engine's simulated pools, ``ours`` first.

    Attributes:
        guard: Who ranks the engine's blocks and by how much, as its guard's own shadow says; None
            without an engine.
        sessions: How many sessions they followed so far.
        ranked_every_s: Seconds between two rankings of shadows of policies; more where ranking
            takes long.
    """

    engine: str | None
    engines: list[str]
    guard: str | None
    sessions: int
    ranked_every_s: float
    step_s: float
    starts: list[float]
    shadows: list[ShadowView]


def add_routes(paths: APIRouter, page: Page) -> None:
    @paths.get("/shadows", response_model=Shadows)
    def shadows(engine: NameQuery = None) -> Response:
        return answered(shadows_of(page, engine))


def shadows_of(page: Page, engine: str | None) -> Shadows:
    now = page.graph.clock()
    if engine is not None:
        chosen_engine(page.graph.tables, engine)
    return shadows_view(page.shadows, engine, now, page.unix, partial(who_ranks, page.graph))


def shadows_view(
    runner: ShadowRunner,
    engine: str | None,
    now: float,
    unix: Callable[[float], float],
    guard: Callable[[str], str],
) -> Shadows:
    """Return an engine's simulated pools, or the first engine's that has some; ``now`` is by the
    graph's clock.
    """
    runner.looked()
    with runner.lock:
        name = engine if engine is not None else next(iter(runner.sets), None)
        found = runner.sets.get(name) if name is not None else None
        step_s, starts, sums = (
            found.steps.merged(now, MOST_STEPS) if found is not None else (STEP_S, [], {})
        )
        return Shadows(
            at=unix(now),
            engine=name,
            engines=list(runner.sets),
            guard=guard(name) if name is not None else None,
            sessions=len(found.sessions) if found is not None else 0,
            ranked_every_s=runner.rank_every_s,
            step_s=step_s,
            starts=[unix(start) for start in starts],
            shadows=_views(found, starts, sums, runner.otherwise) if found is not None else [],
        )


def _views(
    found: ShadowSet, starts: list[float], sums: Sums, otherwise: OtherWeights | None
) -> list[ShadowView]:
    views = [_ours(found, sums)]
    for pool in found.pools:
        view = _view(found, sums, pool)
        if isinstance(pool, PolicyPool) and pool.since is not None:
            heard, said, ours = found.heard_by(pool), view.sentence, view.ours
            if not found.is_bounded:
                ours = _share(heard.ours, heard.asked)
            if pool is found.otherwise and otherwise is not None:
                said = f"the policy {otherwise.policy.name} with {otherwise.said}"
            view = _begun_later(view, pool.since, starts, said, ours)
        views.append(view)
        if pool.capacity == _AS_TIERS and not found.copies:
            views.append(_as_tiers(view, pool))
    return [*views, _ceiling(found)]


def _ours(found: ShadowSet, sums: Sums) -> ShadowView:
    asked, ours = found.asked, found.ours
    if found.is_bounded:
        asked, _, ours = found.belady
    return ShadowView(
        name="ours",
        sentence=_OURS,
        policy="live",
        capacity=1.0,
        tiers=False,
        blocks=found.blocks,
        asked=asked,
        found=ours,
        hit_rate=_share(ours, asked),
        ours=_share(ours, asked),
        history=_history(sums, "ours"),
    )


def _view(found: ShadowSet, sums: Sums, pool: LruPool | PolicyPool) -> ShadowView:
    shown = FoundOf(found.asked_of(pool), pool.found)
    ours = _share(found.ours, found.asked)
    if found.is_bounded:  # curves and ceiling are of the same requests
        shown = found.beside_belady.get(pool.name, _UNKNOWN)
        ours = _share(found.belady.ours, found.belady.asked)
    return ShadowView(
        name=pool.name,
        sentence=_sentence(pool),
        policy=pool.policy_name,
        capacity=pool.capacity,
        tiers=pool.has_tiers,
        blocks=round(found.blocks * pool.capacity),
        asked=shown.asked,
        found=shown.found,
        hit_rate=_share(shown.found, shown.asked),
        ours=ours,
        history=_history(sums, pool.name),
    )


def _history(sums: Sums, name: str) -> list[float | None]:
    """Hit rate by step."""
    steps = zip(sums[name].tolist(), sums["asked"].tolist(), strict=True)
    return [_share(found, asked) for found, asked in steps]


def _begun_later(
    view: ShadowView, since: float, starts: list[float], sentence: str, ours: float | None
) -> ShadowView:
    """A shadow without the steps that began before it did."""
    steps = zip(starts, view.history, strict=True)
    history = [share if start >= since else None for start, share in steps]
    return view.model_copy(update={"history": history, "sentence": sentence, "ours": ours})


def _share(found: int, asked: int) -> float | None:
    return round(found / asked, 4) if asked else None


def _ceiling(found: ShadowSet) -> ShadowView:
    asked, hits, ours = found.belady if found.is_bounded else Ceiling()
    copies = " with its tiers" if found.copies else ""
    return ShadowView(
        name="belady",
        sentence=_BELADY.format(copies=copies) if asked else _NO_BELADY,
        policy="belady",
        capacity=1.0,
        tiers=found.copies > 0,
        blocks=found.blocks + found.copies,
        asked=asked,
        found=hits,
        hit_rate=_share(hits, asked),
        ours=_share(ours, asked),
        history=[],
    )


def _as_tiers(twice: ShadowView, pool: LruPool | PolicyPool) -> ShadowView:
    """A pool twice as large, shown as host memory: a copied block is found as if it had stayed."""
    name = f"{twice.policy} + host memory"
    said = f"{_ranker(pool)} in a pool as large, with host memory for as many copies"
    return twice.model_copy(update={"name": name, "sentence": said, "tiers": True})


def _ranker(pool: LruPool | PolicyPool) -> str:
    is_guarded = isinstance(pool, PolicyPool) and pool.selector is not None
    name = pool.policy_name
    who = "stock vLLM's order" if name == "lru" else f"the policy {name}"
    return f"{who}, guarded as ours is," if is_guarded else who


def _sentence(pool: LruPool | PolicyPool) -> str:
    who = _ranker(pool)
    if pool.has_tiers:
        return f"{who} in a pool as large, with copies in all tiers that this engine has"
    size = {1.0: "in a pool as large", 2.0: "in a pool twice as large"}.get(pool.capacity)
    return f"{who} {size or f'in a pool of {pool.capacity:.0%} of the size'}"


def lru_tokens(runner: ShadowRunner, asked: Mapping[float, int], now: float) -> dict[float, int]:
    """Return prompt tokens that LRU would have found, by the starts of ten-second steps. ``asked``
    has the tokens of all prompts by the same starts: engines with simulated pools stand for all.
    """
    told = [np.empty((3, 0))]  # starts, tokens, of these found
    with runner.lock:
        for shadows in runner.sets.values():
            starts, sums = shadows.steps.series_by_name(now)
            found = sums[shadows.lru[0].name] * shadows.block_size
            told.append(np.array([starts, sums["tokens"], found]))
    together = np.concatenate(told, axis=1)
    steps, place = np.unique(together[0], return_inverse=True)
    tokens, hits = (np.bincount(place, column, len(steps)).tolist() for column in together[1:])
    return {
        start: round(asked.get(start, 0) * of_these / count)
        for start, count, of_these in zip(steps.tolist(), tokens, hits, strict=True)
        if count
    }
