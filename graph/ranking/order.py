"""Makes a ranking: orders blocks by a policy's scores, highest first, under the rules that bind
every policy. Uses vector expressions over columns and walks no edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..compiled import core
from ..errors import GraphError
from ..tables.blocks import APART, Mask, Places, Selection, keep_chains_whole
from ..types import HELD, BlockKey, Rows, SessionState, Tier, as_keys
from ..wire.advice import EvictionRanking
from .copies import worth_spilling
from .formulas import LruPolicy
from .fronts import CopiedColumns, copied
from .policy import Policy, Referee, ScoredRuns, Scores, Terms, View, terms_of
from .rules import (
    PROTECTED_BELOW,
    Limit,
    is_pinned,
    is_protected,
    lay_rules,
    limits_of_kept,
    names_anything,
)

_NEVER: Final = -np.inf


def rank(view: View, policy: Policy, limit: int, for_copies: bool = True) -> EvictionRanking:
    """Return the first ``limit`` blocks, protected blocks and copies that the view's engine should
    lose; with ``for_copies``, also which of the blocks are worth a copy. Under LRU those are the
    ones that an engine evicts next in its own order, whatever is known of them, and advice drops no
    copy: nothing shows there that this knowledge is of use.

    The ranking has no epoch yet; its publisher numbers it. A caller that holds the graph's lock
    keeps it throughout; otherwise it is held only while columns are copied, part by part.
    """
    with view.lock:
        rows = view.blocks.holding(view.engine, HELD).rows
    front = copied(view, policy, rows)
    held, lru = front.every, isinstance(policy, LruPolicy)
    tiers = front.front.own_tiers(view.engine, held)
    there = (tiers & int(Tier.HOT)) != 0
    scores = _ruled_scores(front, policy, there)
    nothing, limit = np.zeros(len(scores), dtype=np.bool_), min(max(0, limit), len(rows))
    idle = (tiers & int(Tier.HOT | Tier.WARM)) == int(Tier.WARM)
    idle = nothing if lru or not idle.any() else idle
    demoting = _highest(front, _tail_first(scores, held, idle), idle, limit)
    in_use = _in_use(front.view, held)
    scores = _tail_first(scores, held, there)
    open_to_loss = scores > PROTECTED_BELOW  # of a run, all or none
    victims = _highest(front, scores, open_to_loss & ~in_use, limit)
    runs, offsets = _highest(front, scores, ~open_to_loss & (scores > _NEVER), len(rows))
    beyond = max(0, len(runs) - limit)  # the least precious, which come first
    protected = runs[beyond:], offsets[beyond:]
    if not for_copies:
        later, worth = _highest(front, scores, nothing, 0), nothing
    elif lru:
        later, worth = _highest(front, front.scores(policy), open_to_loss, limit), ~nothing
    else:
        later = _highest(front, scores, open_to_loss & in_use, limit)
        worth = worth_spilling(front.view.tables, held.rows, view.now)
    with view.lock:
        salt, keys = view.tables.salt(view.engine), front.front.keys_of_runs
        order, spill = keys(*victims, salt, worth)
        _, spill_later = keys(*later, salt, worth)
        kept, _ = keys(*protected, salt, nothing)
        demote, _ = keys(*demoting, salt, nothing)
    first = [spill_later, kept] if lru else [spill, spill_later, kept]
    spill = np.concatenate(first) if for_copies else kept[:0]
    return EvictionRanking(0, view.now, order, kept, spill, demote)


def _in_use(view: View, held: Selection) -> Mask:
    """bool ``[len(held)]``: blocks that a running request of the view's engine reads, as far as is
    known. An engine cannot evict them, and would look at each in vain.
    """
    sessions = view.sessions
    here = sessions.state[: sessions.size] == SessionState.RUNNING
    here &= sessions.engine[: sessions.size] == view.engine
    if not here.any():
        return np.zeros(len(held), dtype=np.bool_)
    since = np.append(np.where(here, sessions.started[: sessions.size], np.inf), np.inf)
    return held.last_used() >= np.take(since, held.of(view.blocks.session), mode="wrap")


def resident_scores(view: View, policy: Policy) -> tuple[Rows, Scores]:
    """Return the rows in the engine's pool, and their scores under the rules, chains tail first."""
    with view.lock:
        resident = view.blocks.holding(view.engine)
    return resident.rows, whole_scores(view, policy, resident)


def whole_scores(view: View, policy: Policy, picked: Selection) -> Scores:
    """Return the scores of any blocks under the rules, float64 ``[len(picked)]``, chains tail
    first, as if a pool held exactly these.
    """
    front = copied(view, policy, picked.rows)
    return front.by_block(front.whole(_ruled_scores(front, policy)))


def whole_runs(view: View, policy: Policy, picked: Selection) -> ScoredRuns:
    """As ``whole_scores``, but one score for each run of consecutive blocks where no rule tells
    them apart.
    """
    front = copied(view, policy, picked.rows)
    scores, lengths = front.whole(_ruled_scores(front, policy)), front.front.lengths
    return ScoredRuns(picked.rows if lengths is None else front.front.firsts, scores, lengths)


def _ruled_scores(front: CopiedColumns, policy: Policy, there: Mask | None = None) -> Scores:
    scores = front.scores(policy)
    if len(scores) != len(front.every):
        raise GraphError(
            f"policy {policy.name!r} gave {len(scores)} scores for {len(front.every)} blocks; "
            "it must give one for each"
        )
    return lay_rules(scores, front.view, front.every, there)


def _tail_first(scores: Scores, held: Selection, among: Mask) -> Scores:
    """float64 ``[len(held)]``: scores with chains whole ``among`` some blocks, ``-inf`` for the
    others.
    """
    if among.all():  # as always where an engine has no other tiers
        return keep_chains_whole(scores, held.parents(), held.blocks_of_each)
    chosen = np.full(len(scores), _NEVER)
    some = held.among(among)
    chosen[among] = keep_chains_whole(scores[among], some.parents(), some.blocks_of_each)
    return chosen


def _highest(
    front: CopiedColumns, scores: Scores, among: Mask, limit: int
) -> tuple[Places, Places]:
    """The ``limit`` blocks with the highest scores where ``among`` is true, highest first, of
    equals the first: the run of each, and its offset there.
    """
    lengths = front.front.lengths
    runs, offsets = np.zeros((2, limit if among.any() else 0), dtype=np.int64)
    if lengths is None:
        found = core.highest(scores, among, runs)
    else:
        found = core.highest_of_runs(scores, lengths, among, runs, offsets)
    return runs[:found], offsets[:found]


# Ranks an engine's blocks by the policy, or leaves the engine its own order if LRU finds more.

Look = Callable[[View], Callable[[], None]]
_FRONT: Final = 4_096  # blocks at the front of a ranking, a second of evictions; chosen


def rank_by_ruler(
    view: View, policy: Policy, referee: Referee | None, limit: int, for_copies: bool = True
) -> EvictionRanking:
    """Return what the view's engine should lose first, by the policy or by LRU; ``for_copies`` as
    in ``rank``.

    The policy learns in any case; with a ``limit`` of 0 nothing else happens. Under LRU the ranking
    has no order, unless room is reserved for sessions: then it has LRU's order under the rules. The
    view's lock is held while columns are read, and not while copies of them are ranked.
    """
    for_copies = for_copies and view.tables.may_have_tiers(view.engine)
    _observe(view, policy)
    if referee is not None:
        referee.watch(view, lambda seen, picked: whole_runs(seen, policy, picked))
    if limit <= 0:
        return EvictionRanking.empty(view.now)
    if not is_under_lru(view.engine, policy, referee):
        return rank(view, policy, limit, for_copies)
    if view.rules.reserved > 0:
        return rank(view, LruPolicy(), limit, for_copies)
    return _only_kept(view, limit, for_copies)


def _observe(view: View, policy: Policy) -> None:
    """Let the policy learn: with the lock while it reads columns, and without it from then on."""
    look: Look | None = getattr(policy, "look", None)
    with view.lock:
        if look is None:
            return policy.observe(view)
        learn = look(view)
    learn()


def _only_kept(view: View, limit: int, for_copies: bool) -> EvictionRanking:
    """Without an order. What is leased, and what stands before it in its chains, is kept as what is
    protected is; it goes before that, each chain tail first.
    """
    with view.lock:
        if not for_copies and not names_anything(view):
            return EvictionRanking.empty(view.now)  # there is nothing to say
    ranking = replace(rank(view, LruPolicy(), limit, for_copies), order=as_keys([]))
    with view.lock:
        return _with_leased(view, ranking)


def _with_leased(view: View, ranking: EvictionRanking) -> EvictionRanking:
    blocks = view.blocks
    held = blocks.holding(view.engine)
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


def front_terms(
    view: View, policy: Policy, referee: Referee | None, ranking: EvictionRanking
) -> Terms:
    """Return the terms, each ``[n]``, of the first 4,096 blocks of a ranking at most, by the policy
    that ranked them. Must be called under the lock under which the ranking was made. Raises what a
    user's own policy raises, and GraphError if it does not return one number for each block.
    """
    rows = view.blocks.find(ranking.order[:_FRONT], view.tables.salt(view.engine))
    if not len(rows):
        return {}
    ruler = LruPolicy() if is_under_lru(view.engine, policy, referee) else policy
    return terms_of(ruler, view, Selection(view.blocks, rows))


def is_under_lru(engine: int, policy: Policy, referee: Referee | None) -> bool:
    """Return whether the engine of a residency column keeps its own order."""
    if isinstance(policy, LruPolicy):
        return True
    return referee is not None and not referee.trusts(engine)


# A block's place among those that an engine may lose, and the policy that ranked it there.


@dataclass(frozen=True, slots=True)
class RankingSources:
    """Who ranks blocks on each engine, with the latest rankings, to explain a block's rank.
    ``referee`` says which engines evict in LRU's order instead; the rankings in ``known`` need not
    be computed again.
    """

    policy: Policy
    referee: Referee | None
    known: Mapping[str, EvictionRanking]


def places(view: View, order: RankingSources, row: int) -> dict[str, dict[str, Any]]:
    """Return, for each engine with the block in its pool, who ranks and how many blocks go before
    it. If LRU ranks instead of the policy, ``policy_rank`` is the place by the policy.
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


def who_ranks(order: RankingSources, ranks: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe, in a sentence, whether score and terms decide on the engines that have a block,
    whose ranks ``places`` returned.
    """
    name = order.policy.name
    others = sorted(engine for engine in ranks if ranks[engine]["ranked_by"] == LruPolicy.name)
    if not others or isinstance(order.policy, LruPolicy):
        return name
    return (
        f"LRU on {', '.join(others)}: there the longest unused block goes first, and of the rules "
        f"only protection and leases hold; score and terms are what {name} would say"
    )


def _policy_place(view: View, order: RankingSources, engine: str, row: int) -> int:
    place = _place_in(order.known.get(engine), int(view.blocks.wire_keys(row)))
    if place is not None:
        return place
    rows, scores = resident_scores(view, order.policy)
    return int((scores > scores[rows == row][0]).sum())


def _lru_place(view: View, row: int) -> int:
    """The place in the engine's own order: the longest unused first, and what is leased or
    protected last.
    """
    resident = view.blocks.holding(view.engine)
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
