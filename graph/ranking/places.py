"""Where a block stands among those that an engine may lose, and in whose order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..messages.advice import EvictionRanking
from ..types import BlockKey
from .formulas import LruPolicy
from .policy import Policy, Referee
from .protection import Limit
from .ruler import is_under_lru
from .rules import is_pinned, is_protected, limits_of_kept
from .scoring import resident_scores
from .view import View


@dataclass(frozen=True, slots=True)
class Order:
    """What decides which block an engine evicts first.

    Attributes:
        policy: Scores blocks, under the rules.
        referee: Says which engines keep their own order all the same; None: no engine does.
        known: Fresh rankings by engine, which need not be computed again.
    """

    policy: Policy
    referee: Referee | None
    known: Mapping[str, EvictionRanking]


def places(view: View, order: Order, row: int) -> dict[str, dict[str, Any]]:
    """Per engine that has the block in its pool: who ranks, and how many blocks go before it.

    Where LRU rules although the policy is another, ``policy_rank`` is the policy's place for it.
    """
    found = {}
    for engine, column in view.tables.engines.items():
        resident = view.blocks.resident(column)
        if not resident[row]:
            continue
        lru = is_under_lru(column, order.policy, order.referee)
        there = view.of(column)
        place = _lru_place(there, row) if lru else _policy_place(there, order, engine, row)
        found[engine] = {
            "ranked_by": LruPolicy.name if lru else order.policy.name,
            "rank": place,
            "of": int(np.count_nonzero(resident)),
        }
        if lru and not isinstance(order.policy, LruPolicy):
            found[engine]["policy_rank"] = _policy_place(there, order, engine, row)
    return found


def who_ranks(order: Order, ranks: Mapping[str, Mapping[str, Any]]) -> str:
    """A sentence: whether score and terms decide on the engines that have a block.

    Args:
        ranks: As ``places`` found.
    """
    name = order.policy.name
    others = sorted(engine for engine in ranks if ranks[engine]["ranked_by"] == LruPolicy.name)
    if not others or isinstance(order.policy, LruPolicy):
        return name
    return (
        f"LRU on {', '.join(others)}: there the longest unused block goes first, and of the rules "
        f"only protection and leases hold; score and terms are what {name} would say"
    )


def _policy_place(view: View, order: Order, engine: str, row: int) -> int:
    place = _place_in(order.known.get(engine), int(view.blocks.wire_keys(row)))
    if place is not None:
        return place
    rows, scores = resident_scores(view, order.policy)
    return int((scores > scores[rows == row][0]).sum())


def _lru_place(view: View, row: int) -> int:
    """The place in the engine's own order: the longest unused first, and what is leased or
    protected last."""
    resident = view.blocks.pick(view.blocks.resident(view.engine))
    within = limits_of_kept(view, resident) == Limit.NONE
    safe, leased = is_protected(view, resident), is_pinned(view, resident)
    kept = np.where(safe & within, 2, leased & within)
    idle = LruPolicy().scores(view, resident)
    mine = int(np.flatnonzero(resident.rows == row)[0])
    before = np.where(kept == kept[mine], idle > idle[mine], kept < kept[mine])
    return int(before.sum())


def _place_in(ranking: EvictionRanking | None, key: BlockKey) -> int | None:
    """How many blocks go before ``key``; None if the ranking does not name it."""
    if ranking is None:
        return None
    found = np.flatnonzero(ranking.order == np.uint64(key))
    return int(found[0]) if len(found) else None
