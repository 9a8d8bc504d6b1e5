"""What is kept whatever scores say, in bounded shares of a pool: blocks that are protected, in all
and per tenant, and room for sessions that came back before."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from ..columns.whole_chains import APART, Mask, Places, keep_chains_whole
from ..tables.blocks import Selection
from ..types import NO_ROW, Authority, BlockFlag, Rows, SessionState, Tier
from .view import View

_CHANCE: Final = 0.05
"""Of a return, below which a session holds no room any more. Chosen: with the chances that
conversations teach, a session has it for ten minutes after its second turn."""
INFERRED_S: Final = 600.0
"""How long after its last use a system text is protected of which nobody said so: as long as a
session counts as live."""


class Limit(IntEnum):
    """What bounds how many blocks are protected."""

    NONE = 0
    INFERRED = 1  # all of what nobody said, together
    TENANT = 2  # the share of one named tenant
    ALL = 3  # the share of the pool


def over_share(view: View, picked: Selection, protected: Mask) -> Mask:
    """bool ``[len(picked)]``: protected blocks beyond the share that may be; see ``limited_by``."""
    return np.asarray(limited_by(view, picked, protected) != Limit.NONE)


def limited_by(view: View, picked: Selection, protected: Mask) -> npt.NDArray[np.uint8]:
    """uint8 ``[len(picked)]``: the ``Limit`` beyond which each protected block is.

    A protected block keeps all that stand before it in its chain, so these count too. The most
    precious keep their protection: by layer, then importance, then last use, then from the start of
    their chain on. Blocks that no named tenant raised count towards the whole only. What is
    inferred is protected while all of it together is within its share, and else none of it is. An
    engine that never reported the size of its pool has no bound.

    Args:
        protected: bool ``[len(picked)]``: which of them a protected layer names.
    """
    limits = np.zeros(len(picked), dtype=np.uint8)
    pool = view.tables.pool_blocks.get(view.engine)
    inferred = protected & is_inferred(view, picked)
    if inferred.any():
        if _inferred_cost(view, picked, inferred) > int(view.rules.inferred_share * (pool or 0)):
            limits[inferred] = Limit.INFERRED
        protected = protected & ~inferred
    if pool is None:
        return limits
    rules, deep = view.rules, picked.of(view.blocks.depth)
    hot = (picked.of(view.blocks.tiers[view.engine]) & int(Tier.HOT)) != 0
    most, each = int(rules.protected_share * pool), int(rules.tenant_share * pool)
    deepest = deep[hot & protected].max(initial=-1)
    near = np.flatnonzero(hot & (deep <= deepest))  # whatever they keep is among these
    if len(near) <= min(most, each):
        return limits
    heads = Selection(view.blocks, picked.rows[near])
    places = _in_order(view, heads, protected[near])
    tenants, costs = _tenants(view, heads.rows[places]), _costs(heads, places)
    granted = (tenants == NO_ROW) | (_sums_of_its_kind(tenants, costs) <= each)
    in_all = np.cumsum(costs * granted) <= most
    limits[near[places[~in_all]]] = Limit.ALL
    limits[near[places[~granted]]] = Limit.TENANT
    return limits


def _in_order(view: View, picked: Selection, among: Mask) -> Places:
    """Places of those ``among`` the picked ones, the most precious first."""
    places = np.flatnonzero(among)
    return places[_most_precious_first(view, Selection(view.blocks, picked.rows[places]))]


def _costs(picked: Selection, places: Places) -> npt.NDArray[np.int64]:
    """int64 ``[len(places)]``: how many of the picked ones each keeps and none before it does.

    Args:
        places: Of protected blocks among them, the most precious first.
    """
    nobody = len(places)
    keeper = np.full(len(picked), nobody * APART)
    keeper[places] = np.arange(nobody) * APART
    first = np.ceil(keep_chains_whole(keeper, picked.parents()) / APART)
    return np.bincount(first.astype(np.int64), minlength=nobody + 1)[:nobody]


def _inferred_cost(view: View, picked: Selection, inferred: Mask) -> int:
    """Blocks of the pool that all of what is inferred would keep."""
    hot = np.flatnonzero(picked.of(view.blocks.tiers[view.engine]) & int(Tier.HOT))
    held = Selection(view.blocks, picked.rows[hot])
    return int(_costs(held, np.flatnonzero(inferred[hot])).sum())


def is_inferred(view: View, picked: Selection) -> Mask:
    """Whether nobody said which layer the block is of."""
    return np.asarray(picked.of(view.blocks.stated) == int(Authority.INFERRED))


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


def _sums_of_its_kind(kinds: Rows, costs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 ``[n]``: the costs of those of its kind up to each, its own among them."""
    order = np.argsort(kinds, kind="stable")
    in_order, sums = kinds[order], np.cumsum(costs[order])
    starts = np.flatnonzero(np.diff(in_order, prepend=in_order[0] - 1))
    before = sums[starts] - costs[order][starts]
    found = np.empty(len(kinds), dtype=np.int64)
    found[order] = sums - np.repeat(before, np.diff(starts, append=len(kinds)))
    return found


def is_reserved(view: View, picked: Selection) -> Mask:
    """bool ``[len(picked)]``: whether the block's session has room reserved in the view's engine.

    Sessions that came back before have, those that were heard of last first, as long as the blocks
    of their last prompts together stay within ``Rules.reserved``. Ended ones have none, nor do
    those that have outlived their chance of another return, nor branches that were left behind.
    """
    view = _of_an_engine(view, picked)
    room = _room(view)
    if room <= 0:
        return np.zeros(len(picked), dtype=np.bool_)
    held = np.append(_sessions_with_room(view, room), False)  # the last one stands for NO_ROW
    left = (picked.of(view.blocks.flags) & int(BlockFlag.SUPERSEDED)) != 0
    return np.asarray(np.take(held, picked.of(view.blocks.session), mode="wrap") & ~left)


def _of_an_engine(view: View, picked: Selection) -> View:
    """The view itself; for a question about a block and no engine, of its session's engine."""
    session = int(picked.of(view.blocks.session)[0]) if len(picked) else NO_ROW
    if view.engine != NO_ROW or session == NO_ROW:
        return view
    return view.of(int(view.sessions.engine[session]))


def _room(view: View) -> float:
    """Blocks that may be reserved: below 1, ``Rules.reserved`` is a share of the pool."""
    reserved = view.rules.reserved
    return reserved if reserved >= 1 else reserved * view.tables.pool_blocks.get(view.engine, 0)


def _sessions_with_room(view: View, room: float) -> Mask:
    """bool ``[sessions]``, those whose last contexts fit ``room`` blocks together."""
    sessions = view.sessions
    size = sessions.size
    rows = np.flatnonzero(
        (sessions.engine[:size] == view.engine)
        & (sessions.turns[:size] > 1)
        & (sessions.state[:size] != SessionState.ENDED)
    ).astype(np.int32)
    rows = rows[sessions.credit(view.now, view.rules.session_memory_s, rows) >= _CHANCE]
    rows = rows[np.argsort(-sessions.last_seen[rows], kind="stable")]
    held = np.zeros(size, dtype=np.bool_)
    held[rows[np.cumsum(sessions.reach[rows]) <= room]] = True
    return held
