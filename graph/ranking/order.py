"""How a ranking is made: a policy's scores, under the rules that bind every policy.

Higher scores go first. All of it is vector expressions over columns; nothing here walks edges
or visits a block at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import GraphError
from ..tables.blocks import APART, BlockTable, Mask, Places, Selection, keep_chains_whole
from ..types import HELD, BlockKey, Rows, Tier, as_keys
from ..wire.advice import EvictionRanking
from .copies import worth_spilling
from .formulas import LruPolicy
from .policy import Policy, Referee, Scores, Terms, View, terms_of
from .rules import (
    PROTECTED_BELOW,
    Limit,
    is_pinned,
    is_protected,
    lay_rules,
    limits_of_kept,
    names_anything,
)

Tiers = npt.NDArray[np.uint8]

_NEVER: Final = -np.inf
_NOBODY: Final = np.zeros(0, dtype=np.bool_)
_FEW: Final = 8  # one of so many is few; chosen


def rank(view: View, policy: Policy, limit: int) -> EvictionRanking:
    """The ``limit`` blocks, protected blocks and copies that the view's engine should lose first.

    The ranking has no epoch yet: its publisher numbers it.
    """
    blocks, tables = view.blocks, view.tables
    held = blocks.pick((blocks.tiers[view.engine, : blocks.size] & HELD) != 0)
    tiers = held.of(blocks.tiers[view.engine])
    there = (tiers & int(Tier.HOT)) != 0
    scores = _ruled_scores(view, policy, held, there)
    demoting = _demoting(scores, blocks, held, tiers, limit)
    scores = _tail_first(scores, blocks, held, there)
    open_to_loss = scores > PROTECTED_BELOW
    victims = _highest(scores, open_to_loss, limit)
    protected = _highest(scores, ~open_to_loss & (scores > _NEVER), limit)
    wanted = worth_spilling(tables, held.rows[victims], view.now)
    named = (victims, protected, np.concatenate([victims[wanted], protected]), demoting)
    keys, salt = held.of(blocks.keys), tables.salt(view.engine)
    order, late, spill, demote = (np.take(keys, places) ^ salt for places in named)
    return EvictionRanking(0, view.now, order, late, spill, demote)


def resident_scores(view: View, policy: Policy) -> tuple[Rows, Scores]:
    """Rows in the engine's pool, and their scores under the rules, chains tail first."""
    resident = view.blocks.pick(view.blocks.resident(view.engine))
    return resident.rows, whole_scores(view, policy, resident)


def whole_scores(view: View, policy: Policy, picked: Selection) -> Scores:
    """float64 ``[len(picked)]``: scores of any blocks under the rules, chains tail first, as if a
    pool held just these."""
    return keep_chains_whole(_ruled_scores(view, policy, picked), picked.parents())


def _ruled_scores(view: View, policy: Policy, held: Selection, there: Mask | None = None) -> Scores:
    scores = policy.scores(view, held)
    if len(scores) != len(held):
        raise GraphError(
            f"policy {policy.name!r} gave {len(scores)} scores for {len(held)} blocks; "
            "it must give one for each"
        )
    return lay_rules(scores, view, held, there)


def _tail_first(scores: Scores, blocks: BlockTable, held: Selection, among: Mask) -> Scores:
    """float64 ``[len(held)]``: scores with chains whole ``among`` some blocks, ``-inf`` for the
    others."""
    if among.all():  # as always where an engine has no other tiers
        return keep_chains_whole(scores, held.parents())
    chosen = np.full(len(scores), _NEVER)
    chosen[among] = keep_chains_whole(scores[among], Selection(blocks, held.rows[among]).parents())
    return chosen


def _demoting(
    scores: Scores, blocks: BlockTable, held: Selection, tiers: Tiers, limit: int
) -> Places:
    """Places with a WARM copy and out of the pool, least worth keeping first."""
    idle = (tiers & int(Tier.HOT | Tier.WARM)) == int(Tier.WARM) if blocks.had_copies else _NOBODY
    if not idle.any():
        return np.empty(0, dtype=np.intp)
    return _highest(_tail_first(scores, blocks, held, idle), idle, limit)


def _highest(scores: Scores, among: Mask, limit: int) -> Places:
    """Places of the ``limit`` highest scores where ``among`` is true, highest first; of equals the
    first place."""
    count = int(np.count_nonzero(among))
    if count == 0 or limit <= 0:
        return np.empty(0, dtype=np.intp)
    if count <= limit or count <= len(scores) // _FEW:
        places = np.flatnonzero(among)
        values = scores[places]
    else:
        values = np.where(among, scores, _NEVER)  # less work than to move so many together
        places = np.flatnonzero(values >= _bar(values, limit))
        values = values[places]
    if limit < len(places):
        high = values >= _bar(values, limit)
        places, values = places[high], values[high]
    return places[_falling(values)][:limit]


def _bar(values: Scores, limit: int) -> Any:
    """The ``limit``-th highest value."""
    return np.partition(values, len(values) - limit)[len(values) - limit]


def _falling(values: Scores) -> Places:
    """intp: what sorts values from the highest to the lowest, equals by their places.

    As a stable sort does, in a quarter of its time where few are equal.
    """
    order = np.argsort(-values)
    in_order = values[order]
    same = in_order[1:] == in_order[:-1]
    if same.any():
        group = np.cumsum(np.append(False, ~same))
        order = np.sort(group * len(values) + order) - group * len(values)
    return order


# Ranks an engine's blocks by the policy, or leaves the engine its own order where that finds
# more.

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


# Where a block stands among those that an engine may lose, and in whose order.


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
