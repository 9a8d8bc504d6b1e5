"""How much of a pool may be protected: a bounded share, in all and for each tenant."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..tables.blocks import Selection
from ..tables.tables import Tables
from ..types import NO_ROW, Rows, Tier

Mask = npt.NDArray[np.bool_]


class Shares(Protocol):
    """Bounds on protection; ``scoring.ScoreProfile`` has them."""

    @property
    def protected_share(self) -> float:
        """Of a pool's blocks, at most."""

    @property
    def tenant_share(self) -> float:
        """Of a pool's blocks, at most, by one tenant's word."""


def demoted(
    tables: Tables, shares: Shares, engine: int, picked: Selection, protected: Mask
) -> Mask:
    """bool ``[len(picked)]``: protected blocks beyond the share that may be.

    The most precious keep their protection: by layer, then importance, then last use, then from
    the start of their chain on. Blocks that no named tenant raised count in all only. An engine
    that never said how large its pool is has no bound.

    Args:
        protected: bool ``[len(picked)]``: which of them a protected layer names.
    """
    beyond = np.zeros(len(picked), dtype=np.bool_)
    pool = tables.pool_blocks.get(engine)
    if pool is None:
        return beyond
    blocks = tables.blocks
    hot = protected & ((picked.of(blocks.tiers[engine]) & int(Tier.HOT)) != 0)
    most, each = int(shares.protected_share * pool), int(shares.tenant_share * pool)
    places = np.flatnonzero(hot)
    if len(places) <= min(most, each):
        return beyond
    places = places[_most_precious_first(tables, Selection(blocks, picked.rows[places]))]
    tenants = _tenants(tables, picked.rows[places])
    kept = (tenants == NO_ROW) | (_number_of_its_kind(tenants) < each)
    kept &= np.cumsum(kept) <= most
    beyond[places[~kept]] = True
    return beyond


def _most_precious_first(tables: Tables, picked: Selection) -> npt.NDArray[np.intp]:
    blocks = tables.blocks
    layer, depth = picked.of(blocks.layer), picked.of(blocks.depth)
    return np.asarray(
        np.lexsort((depth, -picked.last_used(), -picked.of(blocks.importance), layer))
    )


def _tenants(tables: Tables, rows: Rows) -> Rows:
    """int32 ``[len(rows)]``: the tenant whose session raised each; ``NO_ROW``: no named one."""
    raised_by = tables.blocks.raised_by[rows]
    return np.where(raised_by == NO_ROW, NO_ROW, tables.sessions.tenant[raised_by])


def _number_of_its_kind(values: Rows) -> npt.NDArray[np.int64]:
    """int64 ``[n]``: how many equal values stand before each."""
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=in_order[0] - 1))
    numbers = np.empty(len(values), dtype=np.int64)
    lengths = np.diff(starts, append=len(values))
    numbers[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return numbers
