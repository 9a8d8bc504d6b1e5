"""How a ranking is made: a policy's scores, under the rules that bind every policy.

Higher scores go first. All of it is vector expressions over columns; nothing here walks edges
or visits a block at a time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import GraphError
from ..messages.advice import EvictionRanking
from ..tables.blocks import BlockTable, Places, Selection
from ..types import Rows, Tier
from .copy_worth import COPIES, worth_spilling
from .policy import DEPTH_TIE, Policy, Scores
from .rules import PROTECTED_BELOW, Mask, lay_rules
from .view import View

Tiers = npt.NDArray[np.uint8]

_NEVER: Final = -np.inf
_AT_ONCE: Final = 1 << 14  # scores that are lowered together: they stay in a core's cache; chosen


def rank(view: View, policy: Policy, limit: int) -> EvictionRanking:
    """The ``limit`` blocks, protected blocks and copies that the view's engine should lose first.

    The ranking has no epoch yet: its publisher numbers it.
    """
    blocks, tables = view.blocks, view.tables
    held = blocks.pick(blocks.tiers[view.engine, : blocks.size] != 0)
    tiers = held.of(blocks.tiers[view.engine])
    scores = _ruled_scores(view, policy, held)
    demoting = _demoting(scores, blocks, held, tiers, limit)
    scores = _tail_first(scores, blocks, held, (tiers & int(Tier.HOT)) != 0)
    open_to_loss = scores > PROTECTED_BELOW
    victims = _highest(scores, open_to_loss, limit)
    protected = _highest(scores, ~open_to_loss & (scores > _NEVER), limit)
    spilling = np.concatenate([victims, protected])
    wanted = (np.take(tiers, spilling) & COPIES) == 0
    wanted[: len(victims)] &= worth_spilling(tables, held.rows[victims], view.now)
    named = (victims, protected, spilling[wanted], demoting)
    keys, salt = held.of(blocks.keys), tables.salt(view.engine)
    order, late, spill, demote = (np.take(keys, places) ^ salt for places in named)
    return EvictionRanking(0, view.now, order, late, spill, demote)


def resident_scores(view: View, policy: Policy) -> tuple[Rows, Scores]:
    """Rows in the engine's pool, and their scores under the rules, chains tail first."""
    resident = view.blocks.pick(view.blocks.resident(view.engine))
    return resident.rows, whole_scores(view, policy, resident)


def whole_scores(view: View, policy: Policy, picked: Selection) -> Scores:
    """float64 ``[len(picked)]``: scores of any blocks under the rules, chains tail first."""
    return keep_chains_whole(_ruled_scores(view, policy, picked), picked.parents())


def _ruled_scores(view: View, policy: Policy, held: Selection) -> Scores:
    scores = policy.scores(view, held)
    if len(scores) != len(held):
        raise GraphError(
            f"policy {policy.name!r} gave {len(scores)} scores for {len(held)} blocks; "
            "it must give one for each"
        )
    return lay_rules(scores, view, held)


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
    idle = (tiers & int(Tier.HOT | Tier.WARM)) == int(Tier.WARM)
    if not idle.any():
        return np.empty(0, dtype=np.intp)
    return _highest(_tail_first(scores, blocks, held, idle), idle, limit)


def keep_chains_whole(scores: Scores, above: Places) -> Scores:
    """float64 ``[n]``: each score lowered below those of its descendants.

    If a block were evicted before its child, the child could never match again. Blocks whose places
    follow each other, each the parent of the next, are a run.

    Args:
        above: Position of each one's parent; see ``Selection.parents``.
    """
    nobody, lowest = len(scores), scores.copy()
    follows = above[1:-1] == np.arange(nobody - 1)
    _lower_along(lowest, follows)
    if _lower_across(lowest, follows, above[:-1]):
        _lower_along(lowest, follows)
    return lowest


def _lower_along(lowest: Scores, follows: Mask) -> None:
    """Lower each score below those behind it in its run, in place.

    By doubling: after each round every place knows the least score of twice as many behind it.

    Args:
        follows: bool ``[n - 1]``: whether the next place is the child of this one.
    """
    start = 0
    while start < len(lowest):
        end = _end_of_runs(follows, start + _AT_ONCE)
        part, linked = lowest[start:end], follows[start : end - 1]
        reach = 1
        while linked.any():
            behind = part[reach:] - reach * DEPTH_TIE
            np.minimum(part[:-reach], behind, out=part[:-reach], where=linked)
            linked = linked[:-reach] & linked[reach:]
            reach *= 2
        start = end


def _end_of_runs(follows: Mask, least: int) -> int:
    """The end of the run that holds the place before ``least``."""
    behind = follows[least - 1 :]
    return least + int(behind.argmin()) if not behind.all() else len(follows) + 1


def _lower_across(lowest: Scores, follows: Mask, above: Places) -> bool:
    """Lower scores below those of the runs that begin behind them, in place; False if none does.

    By pointer doubling over runs: after round k, the first of each knows the least score of all
    runs that are less than 2^(k+1) links away.

    Args:
        lowest: Scores, each lowered below those behind it in its run.
    """
    nobody = len(lowest)
    first = np.flatnonzero(np.append(True, ~follows))[:nobody]
    target, runs = above[first], len(first)
    linked = target != nobody
    if not linked.any():
        return False
    up = np.searchsorted(first, target, side="right") - 1
    far = np.append((target - first[up] + 1) * DEPTH_TIE, 0.0)
    up = np.append(np.where(linked, up, runs), runs)
    least = np.append(lowest[first], 0.0)
    while (up[:-1] != runs).any():
        np.minimum.at(least, up[:-1], least[:-1] - far[:-1])
        far = far + far[up]
        up = up[up]
    np.minimum.at(lowest, target[linked], least[:-1][linked] - DEPTH_TIE)
    return True


def _highest(scores: Scores, among: Mask, limit: int) -> Places:
    """Places of the ``limit`` highest scores where ``among`` is true, highest first; of equals the
    first place."""
    places = np.flatnonzero(among)
    if places.size == 0 or limit <= 0:
        return places[:0]
    values = scores[places]
    if limit < len(places):
        bar = np.partition(values, len(places) - limit)[len(places) - limit]
        places, values = places[values >= bar], values[values >= bar]
    return places[_falling(values)][:limit]


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
