"""Misses by reason, over time, and what a larger pool would have kept."""

from __future__ import annotations

from typing import Final

from ....dashboards.answers.misses import Loss, Misses, ReasonTotal
from ....graph.logs.history import MINUTE_COLUMNS, History
from ....graph.logs.reasons import REASON_NAMES, REASON_TEXTS
from ...times.unix_time import Unix

_MOST: Final = 0.95  # share of what was lost that the stated capacity would have kept; chosen


def misses_view(history: History, pools: int, now: float, unix: Unix) -> Misses:
    """Totals by reason, and over the last hours.

    Args:
        pools: Blocks of all pools.
        now: By the graph's clock.
    """
    starts, sums = history.reasons.series(now)
    count = len(REASON_NAMES)
    columns = sums.T.tolist() if len(sums) else [[] for _ in range(2 * count)]
    totals = history.totals.tolist()
    return Misses(
        at=unix(now),
        reasons=REASON_TEXTS,
        totals={
            name: ReasonTotal(requests=totals[at], blocks=totals[count + at])
            for at, name in enumerate(REASON_NAMES)
        },
        step_s=history.reasons.step_s,
        starts=[unix(start) for start in starts],
        requests=dict(zip(REASON_NAMES, columns[:count], strict=True)),
        blocks=dict(zip(REASON_NAMES, columns[count:], strict=True)),
        **_minutes(history, starts, now),
        loss=_loss(history, pools),
    )


def _minutes(history: History, starts: list[float], now: float) -> dict[str, list[int]]:
    """What the same steps brought besides; nothing where none was counted."""
    known, sums = history.minutes.series(now)
    rows = dict(zip(known, sums.tolist(), strict=True))
    none = [0] * len(MINUTE_COLUMNS)
    columns = zip(*(rows.get(start, none) for start in starts), strict=True)
    lists = [list(column) for column in columns] or [[] for _ in MINUTE_COLUMNS]
    return dict(zip(MINUTE_COLUMNS, lists, strict=True))


def _loss(history: History, pools: int) -> Loss:
    multi, cross = history.lost.tolist()
    capacities = [_enough(buckets, pools) for buckets in history.beyond.tolist()]
    return Loss(
        multi_turn=multi,
        cross_session=cross,
        capacity_multi_turn=capacities[0],
        capacity_cross_session=capacities[1],
    )


def _enough(buckets: list[int], pools: int) -> int | None:
    """Blocks of pool with which most of what was lost would have stayed."""
    total, so_far = sum(buckets), 0
    for power, count in enumerate(buckets):
        so_far += count
        if total and so_far >= _MOST * total:
            return int(pools + (1 << power))
    return None
