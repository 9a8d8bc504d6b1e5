"""What the logs counted since the start, for metrics."""

from __future__ import annotations

from ....dashboards.source import LogTotals
from ....graph.logs.history import LOST_WAYS, TOKEN_COLUMNS, History
from ....graph.logs.reasons import REASON_NAMES
from ....graph.tables.tables import Tables
from ...shadows.shadow_runner import ShadowRunner


def log_totals(tables: Tables, shadows: ShadowRunner) -> LogTotals:
    """Sums that were kept anyway; the graph is not looked at."""
    history, totals = tables.history, tables.history.totals.tolist()
    count = len(REASON_NAMES)
    return LogTotals(
        tokens=_tokens(history),
        reasons={name: (totals[at], totals[count + at]) for at, name in enumerate(REASON_NAMES)},
        lost=dict(zip(LOST_WAYS, history.lost.tolist(), strict=True)),
        rules=_rules(tables),
        shadows=_shadows(shadows),
        log_bytes=history.nbytes,
    )


def _tokens(history: History) -> dict[str, int]:
    given = dict(zip(TOKEN_COLUMNS, history.given, strict=True))
    found = {name: given[name] for name in ("pool", "loaded", "prefetched")}
    return {**found, "computed": given["asked"] - sum(found.values())}


def _rules(tables: Tables) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for engine, column in list(tables.engines.items()):
        log = tables.history.evictions.get(column)
        if log is not None:
            found |= {(engine, rule): counts for rule, counts in log.by_rule().items()}
    return found


def _shadows(runner: ShadowRunner) -> dict[tuple[str, str], tuple[int, int]]:
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    with runner.lock:
        for engine, each in runner.sets.items():
            counts[engine, "ours"] = each.asked, each.ours
            counts |= {(engine, p.name): (each.asked_of(p), p.found) for p in each.pools}
    return {name: (asked, found) for name, (asked, found) in counts.items() if asked}
