"""Hours of sessions and blocks that come and go, through a graph of bounded size."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from typing import Final

import numpy as np
import psutil
from kvgraph.advisor.page.status import log_totals
from kvgraph.advisor.shadows.runner import ShadowRunner
from kvgraph.dashboards.metrics import SidecarCollector
from kvgraph.dashboards.source import EngineStatus, LogTotals, SidecarStatus
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    RequestFinished,
    RequestStarted,
)
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from ...figures import Figures
from ..faults import Say, Size

RESIDENT: Final = 500_000
GHOSTS: Final = 500_000  # with the resident ones a million blocks
SESSIONS: Final = 100_000  # that are known
COMING: Final = 5_000_000  # in all
BLOCKS_A_SESSION: Final = 10
AT_ONCE: Final = 1_000  # sessions
TENANTS: Final = 70_000  # more than have a name of their own
RSS_CAP: Final = 600 << 20
"""Bytes: a million blocks and three million edges at the README's sizes are 290 MB; as much again
for what a ranking and a growing table need for a moment. Chosen before it was measured."""


class _Source:
    """What ``/metrics`` reads, of a graph alone."""

    def __init__(self, graph: KVCacheGraph) -> None:
        self._graph = graph

    def status(self) -> SidecarStatus:
        stats = self._graph.stats()
        engine = EngineStatus(
            id="e", name="e", model="m", version="v", kind="hook", state="synced", silent_s=0.0,
            gaps=0, resyncs=0, ranking_epoch=1, ranking_age_s=0.1, ranked=1, ranked_protected=0,
            graph=stats.engines["e"], tiers=None,
        )  # fmt: skip
        return SidecarStatus(
            version="0", pid=1, uptime_s=1.0, endpoint="", http="", engines=(engine,),
            graph=stats, counters={"graph": stats.counters}, snapshot={}, config={},
        )  # fmt: skip

    def totals(self) -> LogTotals:
        return log_totals(self._graph.tables, ShadowRunner(self._graph, self._graph.clock))


def churn(sessions: int) -> tuple[int, int, int, int]:
    """Peak RSS in bytes, metric series, blocks and sessions known, after so many sessions."""
    now = [0.0]
    limits = GraphLimits(max_ghosts=GHOSTS, max_sessions=SESSIONS)
    graph, peak, process = KVCacheGraph(limits=limits, clock=lambda: now[0]), 0, psutil.Process()
    for first in range(0, sessions, AT_ONCE):
        now[0] += 5.0
        graph.apply("e", _turns(range(first, min(first + AT_ONCE, sessions))))
        if first % 20_000 == 0:
            graph.rank("e", 8192)
            peak = max(peak, process.memory_info().rss)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SidecarCollector(_Source(graph)))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    series = sum(not line.startswith("#") for line in text.splitlines())
    graph.check_integrity()
    return peak, series, len(graph.tables.blocks), len(graph.tables.sessions)


def _turns(numbers: range) -> list[AnyEvent]:
    """One turn each of new sessions that run at once; as many blocks of old ones leave."""
    asked: list[AnyEvent] = []
    stored: list[AnyEvent] = []
    ended: list[AnyEvent] = []
    tokens = 16 * BLOCKS_A_SESSION
    for number in numbers:
        keys = _keys(1 + number * BLOCKS_A_SESSION, BLOCKS_A_SESSION)
        name, tenant = f"session-{number}", f"tenant-{number % TENANTS}"
        asked.append(RequestStarted(name, keys, tokens, 0, 16, name, tenant))
        stored.append(BlocksStored(keys, None, 16))
        ended.append(RequestFinished(name, keys, tokens, tokens, "stop", name, tenant))
    left = 1 + numbers.start * BLOCKS_A_SESSION - RESIDENT
    if left > 0:
        stored.append(BlocksRemoved(_keys(left, len(numbers) * BLOCKS_A_SESSION)))
    return [*asked, *stored, *ended]


def _keys(first: int, count: int) -> bytes:
    return np.arange(first, first + count, dtype="<u8").tobytes()


def _in_a_process(sessions: int, answer: multiprocessing.connection.Connection) -> None:
    answer.send(churn(sessions))


def run(figures: Figures, size: Size, say: Say) -> None:
    say(f"{COMING:,} sessions, {COMING * BLOCKS_A_SESSION:,} blocks")
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_in_a_process, args=(COMING, theirs), daemon=True)
    process.start()
    theirs.close()
    peak, series, blocks, known = mine.recv()
    process.join()
    figures.add("churn_sessions", COMING, "", "5,000,000")
    figures.add("churn_rss_mb", peak / 1e6, "MB", f"≤ {RSS_CAP / 1e6:.0f}")
    figures.add("churn_metric_series", series, "", "≤ 2,000")
    figures.add("churn_blocks_known", blocks, "", "≤ 1,125,000")
    figures.add("churn_sessions_known", known, "", f"≤ {SESSIONS:,}")
