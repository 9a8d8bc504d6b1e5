"""The graph in numbers, for status pages and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..messages.events import AdmissionReport, AdviceApplied, EngineHello, Pressure, TierReport
from ..ranking.copy_worth import COPIES
from ..ranking.protection import Limit, kept_share
from ..ranking.rules import is_pinned, is_protected, limits_of_kept
from ..ranking.view import View
from ..tables.engine_words import EngineWords, ProtectionBudget
from ..tables.tables import Tables
from ..types import EDGE_NAMES, LAYER_NAMES, STATE_NAMES


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine, as it last described itself."""

    resident: int
    spilled: int  # blocks with a copy in a colder tier
    protected: int  # by their layer
    over_share: int  # of these: beyond the share that may be
    limited: dict[str, int]  # the same, by what bounds them: inferred, tenant, all
    kept: int  # protected or leased, within the share
    kept_share: float  # of the pool, that may be
    budget: ProtectionBudget | None  # what that costs; None: nothing was ever named
    protection: str  # the same in words
    layers: dict[str, int]  # resident blocks by layer
    hello: EngineHello | None
    pressure: Pressure | None
    applied: AdviceApplied | None
    tiers: TierReport | None
    admission: AdmissionReport | None  # None: nobody is ever held there


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Counts and sizes at one moment."""

    blocks: int  # known, resident or not
    edges: dict[str, int]
    sessions: dict[str, int]  # by state
    engines: dict[str, EngineStats]
    counters: dict[str, int]
    bytes: int
    bytes_per_block: float
    bytes_per_edge: float


def graph_stats(view: View, counters: Mapping[str, int], embedding_bytes: int) -> GraphStats:
    """Count everything; vector operations over the columns."""
    tables = view.tables
    blocks, edges, sessions = tables.blocks, tables.edges, tables.sessions
    states = np.bincount(_live_states(tables), minlength=len(STATE_NAMES))
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
    """What protection holds and costs, in words.

    Args:
        kept: Blocks of a pool that are protected or leased.
        beyond: Those that are named, too, and go like others.
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
    resident = blocks.pick(blocks.resident(column))
    spilled = (blocks.tiers[column, : blocks.size] & COPIES) != 0
    protected = is_protected(view, resident)
    by_block = limits_of_kept(view, resident)
    limits = np.bincount(by_block[protected], minlength=len(Limit))
    within = (protected | is_pinned(view, resident)) & (by_block == Limit.NONE)
    kept, budget = int(within.sum()), view.tables.budgets.get(column)
    limited = {each.name.lower(): int(limits[each]) for each in Limit if each}
    words = view.tables.words.get(column) or EngineWords()
    layers = np.bincount(resident.of(blocks.layer), minlength=len(LAYER_NAMES))
    return EngineStats(
        resident=len(resident),
        spilled=int(spilled.sum()),
        protected=int(protected.sum()),
        over_share=sum(limited.values()),
        limited=limited,
        kept=kept,
        kept_share=kept_share(view),
        budget=budget,
        protection=protection_said(kept, int(np.count_nonzero(by_block)), budget),
        layers=dict(zip(LAYER_NAMES, layers.tolist(), strict=True)),
        hello=words.hello,
        pressure=words.pressure,
        applied=words.applied,
        tiers=words.tiers,
        admission=words.admission,
    )


def _live_states(tables: Tables) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return tables.sessions.state[: tables.sessions.size]
