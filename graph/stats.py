"""Counts and sizes of the graph, for status pages and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .ranking.copies import COPIES
from .ranking.policy import View
from .ranking.rules import Limit, is_pinned, is_protected, kept_share, limits_of_kept
from .tables.blocks import known_depth
from .tables.protection import ProtectionBudget
from .tables.tables import Tables
from .tables.walks import EngineReports
from .types import EDGE_NAMES, LAYER_NAMES, NO_ROW, STATE_NAMES, Rows, Tier
from .wire.events import AdmissionReport, AdviceApplied, EngineHello, Pressure, TierReport


@dataclass(frozen=True, slots=True)
class EngineStats:
    resident: int
    spilled: int  # blocks with a copy in a colder tier
    protected: int  # blocks protected by their layer
    over_share: int  # of these, those beyond the share that may be protected
    limited: dict[str, int]  # the same, by what limits them: inferred, tenant, all
    kept: int  # protected or leased, within the share
    kept_share: float  # share of the pool that may be kept
    budget: ProtectionBudget | None  # what keeping costs; None: no block was ever to be kept
    protection: str  # the same as a sentence
    layers: dict[str, int]  # resident blocks by layer
    hello: EngineHello | None
    pressure: Pressure | None
    applied: AdviceApplied | None
    tiers: TierReport | None
    admission: AdmissionReport | None  # None: the engine never holds requests


@dataclass(frozen=True, slots=True)
class GraphStats:
    blocks: int  # known blocks, resident or not
    edges: dict[str, int]
    sessions: dict[str, int]  # session counts by state
    engines: dict[str, EngineStats]
    counters: dict[str, int]
    bytes: int
    bytes_per_block: float
    bytes_per_edge: float


def graph_stats(view: View, counters: Mapping[str, int], embedding_bytes: int) -> GraphStats:
    """Count everything, by vector operations over the columns."""
    tables = view.tables
    blocks, edges, sessions = tables.blocks, tables.edges, tables.sessions
    states = np.bincount(sessions.state[: sessions.size], minlength=len(STATE_NAMES))
    names = sum(each.nbytes for each in (tables.segment_names, tables.tenants, tables.memories))
    per_block = blocks.nbytes + embedding_bytes
    return GraphStats(
        blocks=len(blocks),
        edges=dict(zip(EDGE_NAMES, tables.all_edges.counts().tolist(), strict=True)),
        sessions=dict(zip(STATE_NAMES, states.tolist(), strict=True)),
        engines={
            engine: _engine_stats(view.of(column)) for engine, column in tables.engines.items()
        },
        counters=dict(counters),
        bytes=per_block + edges.nbytes + sessions.nbytes + names,
        bytes_per_block=per_block / max(1, len(blocks)),
        bytes_per_edge=edges.nbytes / max(1, len(edges)),
    )


def protection_said(kept: int, beyond: int, budget: ProtectionBudget | None) -> str:
    """Describe what protection holds and costs: ``kept`` blocks, blocks ``beyond`` the share that
    should be kept and are not, and the ``budget``; None: no block was ever to be kept.
    """
    points = None if budget is None else budget.points
    said = f"protected: {kept:,} blocks"
    if kept and points is not None:
        said += f", {max(0.0, points):.1f} points"
    elif kept:
        said += ", at a price that is not known yet"
    if beyond:
        more = None if budget is None else budget.more_points
        verb = "is" if beyond == 1 else "are"
        said += f"; {beyond:,} {'more ' if kept else ''}{verb} named"
        if more is not None:  # what all of it would cost, less what it costs already
            said += f", and would cost {max(0.0, more - max(0.0, points or 0.0)):.1f}"
    return said


def _engine_stats(view: View) -> EngineStats:
    blocks, column = view.blocks, view.engine
    resident = blocks.holding(column)
    protected = is_protected(view, resident)
    by_block = limits_of_kept(view, resident)
    limits = np.bincount(by_block[protected], minlength=len(Limit))
    within = (protected | is_pinned(view, resident)) & (by_block == Limit.NONE)
    kept, budget = int(within.sum()), view.tables.budgets.get(column)
    limited = {each.name.lower(): int(limits[each]) for each in Limit if each}
    reports = view.tables.reports.get(column) or EngineReports()
    layers = np.bincount(resident.of(blocks.layer), minlength=len(LAYER_NAMES))
    return EngineStats(
        resident=len(resident),
        spilled=len(blocks.holding(column, COPIES)) if blocks.had_copies else 0,
        protected=int(protected.sum()),
        over_share=sum(limited.values()),
        limited=limited,
        kept=kept,
        kept_share=kept_share(view),
        budget=budget,
        protection=protection_said(kept, int(np.count_nonzero(by_block)), budget),
        layers=dict(zip(LAYER_NAMES, layers.tolist(), strict=True)),
        hello=reports.hello,
        pressure=reports.pressure,
        applied=reports.applied,
        tiers=reports.tiers,
        admission=reports.admission,
    )


EngineColumns = npt.NDArray[np.int8]
Mask = npt.NDArray[np.bool_]

_WINDOW: Final = 64  # rows compared together; chosen
_MOST_WINDOWS: Final = 256
"""Windows scanned from a chain's end; longer losses are not reported. Chosen: it bounds the cost of
a query, and blocks stored together stand in consecutive rows."""


class HeldChains(NamedTuple):
    """How much of each chain an engine holds, in blocks: int32 ``[chains]`` each."""

    length: Rows  # blocks of the whole chain; 0: the chain, or the held part, is unknown
    pool: Rows  # how many of its first blocks are in the engine's pool
    copied: Rows  # how many of its first blocks are in the pool or in the engine's colder tiers


def held_chains(tables: Tables, tips: Rows, engines: EngineColumns) -> HeldChains:
    """Count the blocks that engines hold of the chains that end at ``tips``, int32 rows, ``NO_ROW``
    for no chain. ``engines`` are int8 residency columns, below 0 for none.

    Chains are evicted from their tail, so every block before the last one held counts as held.
    """
    known = (tips != NO_ROW) & (engines >= 0)
    tips = np.where(known, tips, NO_ROW).astype(np.int32)
    copied, given_up = _last_held(tables, tips, engines, int(Tier.HOT | Tier.WARM | Tier.COLD))
    pool, given_up_later = _last_held(tables, copied, engines, int(Tier.HOT))
    known &= ~(given_up | given_up_later)
    depth = tables.blocks.depth
    return HeldChains(*(
        np.where(known & (rows != NO_ROW), known_depth(depth[rows]) + 1, 0).astype(np.int32)
        for rows in (tips, pool, copied)
    ))  # fmt: skip


def shared_chains(tables: Tables, tips: Rows) -> Rows:
    """Return how many leading blocks of each chain are in a shared store, as reported by any
    engine, int32 ``[chains]``; 0 for a chain that is too long to scan.
    """
    rows, given_up = _last_held(tables, tips, None, int(Tier.POOL))
    depth = known_depth(tables.blocks.depth[rows])
    return np.where(~given_up & (rows != NO_ROW), depth + 1, 0).astype(np.int32)


def _last_held(
    tables: Tables, tips: Rows, engines: EngineColumns | None, tiers: int
) -> tuple[Rows, Mask]:
    """The last block of each chain that is in one of ``tiers``, and which chains were given up."""
    # ``engines`` is as in ``held_chains``; None: in a tier of any engine.
    blocks, at = tables.blocks, tips.copy()
    open_ = np.flatnonzero(at != NO_ROW)
    for _ in range(_MOST_WINDOWS):
        if not len(open_):
            break
        rows = np.maximum(at[open_, None] - np.arange(_WINDOW, dtype=np.int32), 0)
        parents = blocks.parent[rows]
        linked = np.logical_and.accumulate(parents[:, :-1] == rows[:, 1:], axis=1)
        last = np.count_nonzero(linked, axis=1)  # place of the last that belongs to the chain
        there = (
            np.bitwise_or.reduce(blocks.tiers[:, rows], axis=0)
            if engines is None
            else blocks.tiers[engines[open_, None], rows]
        )
        held = (there & tiers) != 0
        first = held.argmax(axis=1)
        each = np.arange(len(open_))
        found = held[each, first] & (first <= last)
        at[open_] = np.where(found, rows[each, first], parents[each, last])
        open_ = open_[~found & (at[open_] != NO_ROW)]
    given_up = np.zeros(len(at), dtype=np.bool_)
    given_up[open_] = True
    return at, given_up
