"""One block's history: when it left, and who missed it."""

from __future__ import annotations

from math import inf

import numpy as np

from ....dashboards.answers.graph_view import Moment
from ....graph.tables.tables import Tables
from ...times.unix_time import Unix
from .eviction_views import eviction_view
from .request_views import request_view


def block_history(tables: Tables, key: int, unix: Unix) -> list[Moment]:
    """What the logs know of a block, the newest first.

    Args:
        key: As engines call it; of several models' blocks of this key, all.
    """
    moments = [*_evictions(tables, key, unix), *_misses(tables, key, unix)]
    return sorted(moments, key=lambda moment: -moment.at)


def _evictions(tables: Tables, key: int, unix: Unix) -> list[Moment]:
    found = []
    for engine, column in tables.engines.items():
        log = tables.history.evictions.get(column)
        if log is None:
            continue
        numbers, keys = log.keys_since(-inf)
        for number in numbers[keys == (np.uint64(key) ^ tables.salt(column))].tolist():
            view = eviction_view(tables, engine, log, number, unix)
            found.append(_moment(view.at, "eviction", view.sentence, engine, eviction=number))
            if view.wanted_after_s is not None:
                wanted = (
                    f"A request wanted it again, {view.wanted_after_s:.1f} s after it had left."
                )
                at = view.at + view.wanted_after_s
                found.append(_moment(at, "regret", wanted, engine, eviction=number))
    return found


def _misses(tables: Tables, key: int, unix: Unix) -> list[Moment]:
    history = tables.history
    found = []
    for number in history.requests.missing(key):
        view = request_view(history, number, unix)
        assert view.miss is not None
        found.append(_moment(view.at, "miss", view.miss.sentence, view.engine, request=number))
    return found


def _moment(
    at: float,
    what: str,
    sentence: str,
    engine: str,
    request: int | None = None,
    eviction: int | None = None,
) -> Moment:
    return Moment(
        at=at,
        what=what,
        sentence=sentence,
        engine=engine,
        request=request,
        eviction=eviction,
        blocks=None,
    )
