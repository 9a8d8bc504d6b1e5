"""Ranks an engine's blocks by the policy, or leaves the engine its own order where that
finds more."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from ..columns.whole_chains import APART, keep_chains_whole
from ..messages.advice import EvictionRanking
from ..tables.blocks import Selection
from ..types import as_keys
from .formulas import LruPolicy
from .policy import Policy, Referee, Terms, terms_of
from .protection import Limit, names_anything
from .rules import is_pinned, limits_of_kept
from .scoring import rank, whole_scores
from .view import View

_FRONT: Final = 4_096  # blocks of a ranking: a second of evictions; chosen


def rank_by_ruler(
    view: View, policy: Policy, referee: Referee | None, limit: int
) -> EvictionRanking:
    """What the view's engine should lose first, by the policy or by LRU.

    The policy learns in any case; with a ``limit`` of 0 that is all. Where LRU rules, the ranking
    has no order; but where room is reserved for sessions, it has LRU's order under the rules.
    """
    _learn(view, policy, referee)
    if limit <= 0:
        return EvictionRanking.empty(view.now)
    if not is_under_lru(view.engine, policy, referee):
        return rank(view, policy, limit)
    has_room = view.rules.reserved > 0
    return rank(view, LruPolicy(), limit) if has_room else _only_kept(view, limit)


def _keeps_nothing(view: View) -> bool:
    """Whether the view's engine has neither tiers nor a block that may be protected or leased: then
    there is nothing to say where LRU rules."""
    words = view.tables.words.get(view.engine)
    if words is None or words.tiers is not None or words.pressure is None:
        return False  # it may have tiers, and not have said so yet
    return not names_anything(view)


def _only_kept(view: View, limit: int) -> EvictionRanking:
    """Without an order. What is leased, and what stands before it in its chains, is kept as what is
    protected is; it goes before that, each chain tail first."""
    if _keeps_nothing(view):
        return EvictionRanking.empty(view.now)
    ranking = replace(rank(view, LruPolicy(), limit), order=as_keys([]))
    blocks = view.blocks
    held = blocks.pick(blocks.resident(view.engine))
    leased = is_pinned(view, held)
    if not leased.any():
        return ranking
    leased &= limits_of_kept(view, held) == Limit.NONE
    kept = keep_chains_whole(np.where(leased, 0.0, APART), held.parents()) < APART / 2
    rows = held.rows[kept]
    keys = blocks.keys[rows[np.argsort(-blocks.depth[rows], kind="stable")]]
    keys = keys ^ view.tables.salt(view.engine)
    keys = keys[~np.isin(keys, ranking.protected)]
    return replace(ranking, protected=np.concatenate([keys, ranking.protected]))


def _learn(view: View, policy: Policy, referee: Referee | None) -> None:
    """Let the policy learn from what happened, and the referee compare what it and what is kept
    find with what would be found without."""
    policy.observe(view)
    if referee is not None:
        referee.watch(view, lambda seen, picked: whole_scores(seen, policy, picked))


def front_terms(
    view: View, policy: Policy, referee: Referee | None, ranking: EvictionRanking
) -> Terms:
    """The terms, each ``[n]``, of the first 4,096 blocks of a ranking at most, by whatever ranked
    them. To be called under the lock under which the ranking was made.

    Raises:
        Exception: A policy of somebody's own fails to say so.
        GraphError: It tells other than one number for each block.
    """
    rows = view.blocks.find(ranking.order[:_FRONT], view.tables.salt(view.engine))
    if not len(rows):
        return {}
    ruler = LruPolicy() if is_under_lru(view.engine, policy, referee) else policy
    return terms_of(ruler, view, Selection(view.blocks, rows))


def is_under_lru(engine: int, policy: Policy, referee: Referee | None) -> bool:
    """Whether the engine of a residency column keeps its own order."""
    if isinstance(policy, LruPolicy):
        return True
    return referee is not None and not referee.trusts(engine)
