"""Ranks an engine's blocks by the policy, or leaves the engine its own order where that
finds more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ..messages.advice import EvictionRanking
from ..types import as_keys
from .formulas import LruPolicy
from .policy import Policy, Referee
from .scoring import rank, whole_scores
from .view import View


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
    if is_under_lru(view.engine, policy, referee):
        ranking = rank(view, LruPolicy(), limit)
        return ranking if view.rules.reserved > 0 else _only_kept(ranking, view)
    return rank(view, policy, limit)


def _only_kept(ranking: EvictionRanking, view: View) -> EvictionRanking:
    """Without an order; what is leased is kept as what is protected is, and goes before it."""
    blocks = view.blocks
    leased = blocks.resident(view.engine) & (blocks.pinned_until[: blocks.size] > view.now)
    keys = blocks.keys[np.flatnonzero(leased)] ^ view.tables.salt(view.engine)
    late = np.concatenate([np.setdiff1d(keys, ranking.protected), ranking.protected])
    return replace(ranking, order=as_keys([]), protected=late)


def _learn(view: View, policy: Policy, referee: Referee | None) -> None:
    """Let the policy learn from what happened, and the referee compare it with LRU."""
    policy.observe(view)
    if referee is not None and not isinstance(policy, LruPolicy):
        referee.watch(view, partial(whole_scores, view, policy))


def is_under_lru(engine: int, policy: Policy, referee: Referee | None) -> bool:
    """Whether the engine of a residency column keeps its own order."""
    if isinstance(policy, LruPolicy):
        return True
    return referee is not None and not referee.trusts(engine)
