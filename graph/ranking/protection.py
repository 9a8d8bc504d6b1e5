"""How much of a pool may be protected: a bounded share, in all and per tenant."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..tables.blocks import Selection
from ..types import NO_ROW, Rows, Tier
from .view import View

Mask = npt.NDArray[np.bool_]


def over_share(view: View, picked: Selection, protected: Mask) -> Mask:
    """bool ``[len(picked)]``: protected blocks beyond the share that may be protected.

    The most precious keep their protection: by layer, then importance, then last use, then from the
    start of their chain on. Blocks that no named tenant raised count towards the whole only. An
    engine that never reported the size of its pool has no bound.

    Args:
        protected: bool ``[len(picked)]``: which of them a protected layer names.
    """
    beyond = np.zeros(len(picked), dtype=np.bool_)
    pool = view.tables.pool_blocks.get(view.engine)
    if pool is None:
        return beyond
    blocks, rules = view.blocks, view.rules
    hot = protected & ((picked.of(blocks.tiers[view.engine]) & int(Tier.HOT)) != 0)
    most, each = int(rules.protected_share * pool), int(rules.tenant_share * pool)
    places = np.flatnonzero(hot)
    if len(places) <= min(most, each):
        return beyond
    places = places[_most_precious_first(view, Selection(blocks, picked.rows[places]))]
    tenants = _tenants(view, picked.rows[places])
    kept = (tenants == NO_ROW) | (_number_of_its_kind(tenants) < each)
    kept &= np.cumsum(kept) <= most
    beyond[places[~kept]] = True
    return beyond


def _most_precious_first(view: View, picked: Selection) -> npt.NDArray[np.intp]:
    blocks = view.blocks
    layer, depth = picked.of(blocks.layer), picked.of(blocks.depth)
    return np.asarray(
        np.lexsort((depth, -picked.last_used(), -picked.of(blocks.importance), layer))
    )


def _tenants(view: View, rows: Rows) -> Rows:
    """int32 ``[len(rows)]``: the tenant whose session raised each; ``NO_ROW``: no named one."""
    raised_by = view.blocks.raised_by[rows]
    return np.where(raised_by == NO_ROW, NO_ROW, view.sessions.tenant[raised_by])


def _number_of_its_kind(values: Rows) -> npt.NDArray[np.int64]:
    """int64 ``[n]``: how many equal values stand before each."""
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=in_order[0] - 1))
    numbers = np.empty(len(values), dtype=np.int64)
    lengths = np.diff(starts, append=len(values))
    numbers[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return numbers
