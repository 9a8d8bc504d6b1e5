"""Problems that need attention, in words: what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...dashboards.answer import Notice
from ...dashboards.source import EngineStatus, SidecarStatus
from ...graph.logs.history import WINDOW_S, LoggedTables
from ...graph.logs.reasons import REASON_NAMES, REASON_TEXTS, Reason
from ...graph.wire.events import REMEDY, BlockHashing, disagreements
from ..sockets.kv_order import SourceState
from ..words.times import seconds
from ..words.words import beside_lru_lately
from .evictions import protected_lost

STALE_S: Final = 2.0  # an engine ignores advice that is older
_WASTED_SHARE: Final = 0.5  # unused share of prefetched blocks above which to warn; chosen
_LEAST_BLOCKS: Final = 256  # blocks below which a share means nothing; chosen
_WANTED_SHARE: Final = 0.5  # share of evicted blocks requested again from which to warn; chosen
_MINUTE_S: Final = 60.0
_FELT_S: Final = 1.0  # a wait that people notice; chosen
_QUEUED_SHARE: Final = 0.1  # of requests that must have waited for this to count as a queue; chosen
_LEAST_QUEUED: Final = 3  # likewise, the number of requests; chosen
_LEAST_REQUESTS: Final = 50  # requests below which finding nothing means nothing; chosen
_NO_HITS_SHARE: Final = 0.01  # share of blocks found up to which it counts as nothing; chosen
_REPEATED_SHARE: Final = 0.5  # of requests that repeat a prompt, to expect hits; chosen
_INCOMPLETE: Final = frozenset({SourceState.PARTIAL.value, SourceState.DEGRADED.value})
_ORDER: Final = ("serious", "warning", "info")
_BEYOND: Final = {
    "tenant": "a tenant's share of the pool (score.tenant_share)",
    "all": "what its price allows, or score.protected_share",
}


def notices(tables: LoggedTables, status: SidecarStatus | None, now: float) -> list[Notice]:
    """Return what needs attention, the most serious first; ``now`` is by the graph's clock."""
    found = list(_found(tables, status, now))
    return sorted(found, key=lambda notice: _ORDER.index(notice.level))


def _found(tables: LoggedTables, status: SidecarStatus | None, now: float) -> Iterator[Notice]:
    if status is None:
        return
    yield from _lost_engines(status)
    if not status.engines and not status.lost:
        yield Notice(
            level="info",
            text="No engine is connected. Start one with AITHER_KVCACHE_GRAPH=1; its log then "
            "says that it is linked.",
        )
    if error := status.config.get("error"):
        yield Notice(
            level="warning",
            text=f"The configuration file was changed and is refused, so the old one stays: "
            f"{error}",
            view="weights",
        )
    if error := status.snapshot.get("error"):
        yield Notice(level="warning", text=f"The snapshot is not written: {error}")
    hashing = (BlockHashing(each.name, each.model, each.hashing) for each in status.engines)
    for said in disagreements(hashing):
        yield Notice(level="warning", text=f"{said} {REMEDY}", view="engines")
    yield from _thrashing(tables, status, now)
    for engine in status.engines:
        yield from _engine_notices(tables, engine, now)


def _lost_engines(status: SidecarStatus) -> Iterator[Notice]:
    for name, ago_s in status.lost.items():
        if ago_s <= WINDOW_S:
            yield Notice(
                level="warning",
                text=f"{name} went {seconds(ago_s)} ago, or fell silent: what it held is "
                "forgotten, and it gets no advice. If it should still serve, its own log says why.",
            )


def _recomputes_most(
    tables: LoggedTables, status: SidecarStatus, now: float
) -> EngineStatus | None:
    """The engine that recomputed the most blocks lately; None where there is only one."""
    again = {
        each.id: tables.history.requests.again(each.id, now - WINDOW_S) for each in status.engines
    }
    most = max(status.engines, key=lambda each: again[each.id], default=None)
    return most if most is not None and len(again) > 1 and again[most.id] else None


def _thrashing(tables: LoggedTables, status: SidecarStatus, now: float) -> Iterator[Notice]:
    sums = tables.history.minutes.last(WINDOW_S, now)
    evicted, wanted = sums["evicted"], sums["wanted"]
    if evicted >= _LEAST_BLOCKS and wanted >= _WANTED_SHARE * evicted:
        most = _recomputes_most(tables, status, now)
        yield Notice(
            level="warning",
            text=f"Of {evicted:,} blocks that left in the last ten minutes, {wanted / evicted:.0%} "
            f"were computed again{'' if most is None else f', most on {most.name}'}: the sessions "
            "that come need more than the pools hold. What if shows what more memory would find; "
            f"{_more_copies(status, most)} keeps copies of what leaves, and `kvgraph route` "
            "spreads sessions over more engines.",
            engine=None if most is None else most.id,
            view="whatif",
        )


def _no_hits(tables: LoggedTables, engine: EngineStatus, now: float) -> Iterator[Notice]:
    told = tables.history.requests.repeats(engine.id, now - WINDOW_S)
    if told.reason is None or told.requests < _LEAST_REQUESTS:
        return
    if told.found > _NO_HITS_SHARE * told.asked or told.repeated < _REPEATED_SHARE * told.requests:
        return
    why, share = REASON_TEXTS[REASON_NAMES[told.reason]], told.found / told.asked
    began, advice = "began as another prompt had begun before", (
        f"Of most of them, the first block: {why}. Is prefix caching on, the pool large enough, "
        "and the same hash seed and salt used everywhere? `kvgraph doctor` looks."
    )  # fmt: skip
    if told.reason is Reason.DIVERGED:  # from its session's last one, before the first block's end
        began = "went on with a session, but began otherwise than its prompts before"
        advice = "Does something at their beginning change each time, such as a date or an id?"
    yield _notice(
        "serious", engine,
        f"It finds nothing: of {told.requests:,} requests in the last ten minutes "
        f"{told.repeated:,} {began}, and {share:.0%} of their blocks were in the cache. {advice}",
        "misses",
    )  # fmt: skip


def _more_copies(status: SidecarStatus, most: EngineStatus | None) -> str:
    tiers = [each.tiers for each in (status.engines if most is None else [most])]
    has_tiers = any(each is not None and each.warm_capacity for each in tiers)
    return "a larger AITHER_KVCACHE_WARM_GIB" if has_tiers else "AITHER_KVCACHE_WARM_GIB"


def _engine_notices(tables: LoggedTables, engine: EngineStatus, now: float) -> Iterator[Notice]:
    if engine.kind == "hook" and (engine.ranking_age_s or 0.0) > STALE_S:
        yield _notice(
            "serious", engine,
            f"Its ranking is {engine.ranking_age_s:.1f} s old: beyond {STALE_S:.0f} s it evicts "
            "as stock vLLM does. Is the sidecar short of processor time?",
        )  # fmt: skip
    if (lost := history_lost(engine)) is not None:
        yield _notice("warning", engine, lost)
    elif engine.state not in ("synced", "waiting"):
        yield _notice(
            "warning", engine, f"It is {engine.state}: until that is over it gets no advice."
        )
    if engine.left_out:
        yield _notice(
            "warning", engine,
            f"{engine.left_out:,} of its KV events were left out, the last because: "
            f"{engine.last_left_out}.",
        )  # fmt: skip
    reports = tables.reports_of(engine.id)
    if reports.applied is not None and now - reports.dropped_at <= WINDOW_S:
        yield _notice(
            "warning", engine,
            f"{reports.applied.dropped:,} of its events since its start never arrived, the last of "
            f"them {seconds(now - reports.dropped_at)} ago; each gap cost a resync. The sidecar "
            "was away or too slow.",
        )  # fmt: skip
    yield from _no_hits(tables, engine, now)
    yield from _queue(tables, engine, now)
    yield from _protection(tables, engine)
    yield from _wasted_prefetch(engine)
    if engine.ruling is not None and not engine.ruling.policy_rules and engine.ruling.changes:
        yield _notice(
            "info", engine,
            "The guard let LRU take over, which had found more. The policy goes on in a shadow, "
            f"{beside_lru_lately(engine.ruling.ahead)}, and ranks again once it is clearly ahead.",
        )  # fmt: skip


def history_lost(engine: EngineStatus) -> str | None:
    """Return a sentence for an engine whose history has gaps that nothing can fill, else None."""
    if engine.state not in _INCOMPLETE:
        return None
    return "Watched only: some of its history is lost for good, so its counts are incomplete."


def _queue(tables: LoggedTables, engine: EngineStatus, now: float) -> Iterator[Notice]:
    waits = tables.history.requests.queued(engine.id, now - _MINUTE_S)
    slow = waits[waits > _FELT_S]
    if len(slow) < max(_LEAST_QUEUED, _QUEUED_SHARE * len(waits)):
        return
    yield _notice(
        "warning", engine,
        f"{len(slow):,} of the {len(waits):,} requests that began in the last minute had waited "
        f"in its queue for longer than {_FELT_S:.0f} s, the longest {seconds(float(slow.max()))}. "
        "Misses, the slowest first, says what each waited for and what would have helped.",
        "misses",
    )  # fmt: skip


def _protection(tables: LoggedTables, engine: EngineStatus) -> Iterator[Notice]:
    limited, said = {}, ""
    if engine.graph is not None:
        limited, said = engine.graph.limited, engine.graph.protection
    beyond = [f"{limited[which]:,} beyond {share}" for which, share in _BEYOND.items()
              if limited.get(which)]  # fmt: skip
    if beyond:
        yield _notice(
            "info", engine,
            f"More blocks are named as protected than are kept: {', '.join(beyond)}. These are "
            f"evicted like others, those that are wanted least first ({said}).", "weights",
        )  # fmt: skip
    log = tables.history.evictions.get(tables.engines.get(engine.id, -1))
    lost = None if log is None else protected_lost(log)
    if lost is not None:
        yield _notice("warning", engine, lost, "evictions")


def _wasted_prefetch(engine: EngineStatus) -> Iterator[Notice]:
    tiers = engine.tiers
    if tiers is None:
        return
    known = tiers.prefetch_useful + tiers.prefetch_wasted
    if known >= _LEAST_BLOCKS and tiers.prefetch_wasted > _WASTED_SHARE * known:
        yield _notice(
            "warning", engine,
            f"{tiers.prefetch_wasted / known:.0%} of what was prefetched was evicted unused. Do "
            "callers say when they expect to return?",
        )  # fmt: skip


def _notice(level: str, engine: EngineStatus, text: str, view: str = "engines") -> Notice:
    return Notice.model_validate(
        {"level": level, "text": f"{engine.name}: {text}", "engine": engine.id, "view": view}
    )
