"""How a ranking is made: a policy's scores, under the rules that bind every policy.

Higher scores go first. All of it is vector expressions over columns; nothing here walks edges
or visits a block at a time.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..columns.whole_chains import keep_chains_whole
from ..errors import GraphError
from ..messages.advice import EvictionRanking
from ..tables.blocks import BlockTable, Mask, Places, Selection
from ..types import HELD, Rows, Tier
from .copy_worth import worth_spilling
from .policy import Policy, Scores
from .rules import PROTECTED_BELOW, lay_rules
from .view import View

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
