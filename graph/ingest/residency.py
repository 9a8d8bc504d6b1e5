"""Which engine has which residency column."""

from __future__ import annotations

from ..errors import GraphError
from ..tables.tables import Tables
from ..types import MAX_ENGINES


def column_of(tables: Tables, engine: str, model: str) -> int:
    """The engine's residency column; an engine that is new is given a free one.

    Args:
        model: What a new engine runs, as far as it does not report it itself.

    Raises:
        GraphError: All columns are taken.
    """
    engines = tables.engines
    if engine not in engines:
        free = sorted(set(range(MAX_ENGINES)) - set(engines.values()))
        if not free:
            raise GraphError(
                f"a sidecar advises at most {MAX_ENGINES} engines at once; "
                "start another one for this engine"
            )
        tables.blocks.reserve_engines(free[0] + 1)
        engines[engine] = free[0]
        tables.models[free[0]] = model
    return engines[engine]
