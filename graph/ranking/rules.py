"""The rules that bind every policy: what is evicted first, what is kept, and what is lost last.
Each rule's weight, a small integer, exceeds the sum of all smaller ones, so that the weightiest
rule in which two blocks differ decides. Scores decide between equal ranks, clipped to less than one
step between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..tables.blocks import APART, Mask, Places, Selection, keep_chains_whole
from ..types import NO_ROW, Authority, BlockFlag, Rows, SessionState, layer_mask
from .copies import COPIES
from .policy import Scores, View

# What is kept whatever the scores are, within shares of a pool: protected blocks, in all and per
# tenant, and room for sessions that returned before.

_CHANCE: Final = 0.05
"""Probability of a return below which a session no longer holds room or protects anything. Chosen:
with the probabilities that conversations teach, a session holds it for ten minutes after its second
turn.
"""
# In which tenants' blocks are excluded; after them the total binds alone. Chosen.
_ROUNDS: Final = 4
LATELY_S: Final = 600.0
"""Seconds after its last use for which a block counts as wanted if several sessions share it, or if
it has no session: as long as a session counts as live.
"""


class Limit(IntEnum):
    """The bound that limits how many blocks are kept whatever the scores are."""

    NONE = 0
    INFERRED = 1  # all inferred layers together
    TENANT = 2  # the share of one named tenant
    ALL = 3  # the share of the pool


def kept_share(view: View) -> float:
    """Return the share of the engine's pool that is kept whatever the scores are: the operator's
    setting, or what the price allows.
    """
    if view.kept_share is not None:
        return view.kept_share
    if view.rules.protected_share is not None:
        return view.rules.protected_share
    return view.tables.kept_share(view.engine)


def may_keep(view: View) -> int | None:
    """Return how many blocks of the engine's pool may be kept whatever the scores are; None: its
    size is not known.
    """
    pool = view.tables.pool_blocks.get(view.engine)
    return None if pool is None else int(kept_share(view) * pool)


def names_anything(view: View) -> bool:
    """Return whether any block of the engine's pool has a protected layer, or is leased."""
    return len(which_are_named(view, view.blocks.holding(view.engine))) > 0


def which_are_named(view: View, picked: Selection) -> Mask:
    """Return which blocks have a protected layer, or are leased, bool ``[len(picked)]``; empty if
    none is.
    """
    blocks, layers = view.blocks, layer_mask(view.rules.protected_layers)
    named = np.zeros(0, dtype=np.bool_)
    if core.is_any(layers, blocks.layer, picked.rows):
        named = np.take(layers, picked.of(blocks.layer))
    if blocks.pinned_until.flags.writeable:  # else it was never written: nothing is leased
        leased = picked.of(blocks.pinned_until) > view.now
        if leased.any():
            named = leased | named if len(named) else leased
    return named


def limited_by(
    view: View, picked: Selection, protected: Mask, leased: Mask, there: Mask | None = None
) -> npt.NDArray[np.uint8]:
    """Return, for each block to be kept, the ``Limit`` that excludes it, uint8 ``[len(picked)]``.

    A kept block keeps all blocks before it in its chain, so these count too. The most wanted blocks
    stay within the share, see ``_most_wanted_first``. Blocks that no named tenant raised count
    towards the total only. Inferred blocks are kept only if all of them together are within their
    share. An engine that never reported the size of its pool has no limit.

    Args:
        protected: bool ``[len(picked)]``: which blocks have a protected layer.
        leased: bool ``[len(picked)]``: which blocks are leased.
        there: bool ``[len(picked)]``: which blocks are in the pool; None: all.
    """
    limits = np.zeros(len(picked), dtype=np.uint8)
    rules, share = view.rules, kept_share(view)
    is_priced = rules.protected_share is None or view.kept_share is not None
    pool = view.tables.pool_blocks.get(view.engine)
    there = np.ones(len(picked), dtype=np.bool_) if there is None else there
    inferred = protected & is_inferred(view, picked)
    if inferred.any():
        most = int(min(rules.inferred_share, share) * (pool or 0))
        if _inferred_cost(view, picked, inferred, there) > most:
            limits[inferred] = Limit.INFERRED
        protected = protected & ~inferred
    if pool is None:
        return limits
    named = protected | leased
    each = min(rules.tenant_share, share / 2) if is_priced else rules.tenant_share
    most, each = int(share * pool), int(each * pool)
    if not most:
        limits[named & there] = Limit.ALL
        return limits
    deep = picked.of(view.blocks.depth)
    deepest = deep[there & named].max(initial=-1)
    near = np.flatnonzero(there & (deep <= deepest))  # whatever they keep is among these
    heads = Selection(view.blocks, picked.rows[near])
    if _block_count(heads) <= min(most, each):
        return limits
    places = _in_order(view, heads, named[near], protected[near])
    tenants, costs = _tenants(view, heads.rows[places]), _costs(heads, places)
    granted = np.ones(len(places), dtype=np.bool_)
    for _ in range(_ROUNDS):  # what an excluded block would have kept is on the others' account
        theirs = tenants[granted]
        within = (theirs == NO_ROW) | (_sums_of_its_kind(theirs, costs) <= each)
        if within.all():
            break
        granted[granted] = within
        costs = _costs(heads, places[granted])
    in_all = granted.copy()
    in_all[granted] = np.cumsum(costs) <= most
    limits[near[places[~in_all]]] = Limit.ALL
    limits[near[places[~granted]]] = Limit.TENANT
    return limits


def _in_order(view: View, picked: Selection, named: Mask, protected: Mask) -> Places:
    """Places of the ``named`` ones among the picked, those that are wanted most first."""
    places = np.flatnonzero(named)
    chosen = Selection(view.blocks, picked.rows[places])
    return places[_most_wanted_first(view, chosen, protected[places])]


def _costs(picked: Selection, places: Places) -> npt.NDArray[np.int64]:
    """int64 ``[len(places)]``: how many of the picked blocks each keeps and none before it does;
    those that are wanted most come first in ``places``.
    """
    nobody = len(places)
    keeper = np.full(len(picked), nobody * APART)
    keeper[places] = np.arange(nobody) * APART
    first = np.ceil(keep_chains_whole(keeper, picked.parents()) / APART)
    costs = np.bincount(first.astype(np.int64), picked.blocks_of_each, minlength=nobody + 1)
    return costs[:nobody].astype(np.int64)


def _block_count(picked: Selection) -> int:
    lengths = picked.blocks_of_each
    return len(picked) if lengths is None else int(lengths.sum())


def _inferred_cost(view: View, picked: Selection, inferred: Mask, there: Mask) -> int:
    """Blocks of the pool that all of what is inferred would keep."""
    hot = np.flatnonzero(there)
    held = Selection(view.blocks, picked.rows[hot])
    return int(_costs(held, np.flatnonzero(inferred[hot])).sum())


def is_inferred(view: View, picked: Selection) -> Mask:
    """Return whether the layer of each block was inferred, not stated."""
    return np.asarray(picked.of(view.blocks.stated) == int(Authority.INFERRED))


def is_wanted(view: View, picked: Selection) -> Mask:
    """Return whether a live session may request the block again: several sessions share it and one
    used it lately, or its own session is expected to return.
    """
    lately = picked.last_used() >= view.now - LATELY_S
    nobodys = picked.of(view.blocks.session) == NO_ROW
    expected = np.where(nobodys, lately, _chances(view, picked) >= _CHANCE)
    return np.asarray(expected | (_is_shared(view, picked) & lately))


def _is_shared(view: View, picked: Selection) -> Mask:
    return np.asarray((picked.of(view.blocks.flags) & int(BlockFlag.SHARED)) != 0)


def _chances(view: View, picked: Selection) -> npt.NDArray[np.float64]:
    """float64 ``[len(picked)]``: of a return of each block's session; 0 for blocks of none."""
    sessions, session = view.sessions, picked.of(view.blocks.session)
    rows, chances = sessions.among(session), np.zeros(sessions.size + 1)
    chances[rows] = sessions.credit(view.now, view.rules.session_memory_s, rows)
    return np.asarray(np.take(chances, session, mode="wrap"))  # the last one stands for NO_ROW


def _most_wanted_first(view: View, picked: Selection, protected: Mask) -> npt.NDArray[np.intp]:
    """What is protected comes before what is only leased. Then comes what several sessions share,
    by layer, importance and last use; then what belongs to one session, by the chance of its
    return: each block costs as much to keep as to compute again. Chains from their start on.
    """
    blocks = view.blocks
    layer, depth = picked.of(blocks.layer), picked.of(blocks.depth)
    shared = _is_shared(view, picked)
    # In tenths: idle seconds decide nothing between two sessions.
    chance = np.where(shared, 1.0, _chances(view, picked).round(1))
    used, importance = picked.last_used(), picked.of(blocks.importance)
    keys = (depth, -used, -importance, layer, -chance, ~shared, ~protected)
    return np.asarray(np.lexsort(keys))


def _tenants(view: View, rows: Rows) -> Rows:
    """int32 ``[len(rows)]``: the tenant whose session raised each; ``NO_ROW``: no named one."""
    raised_by, sessions = view.blocks.raised_by[rows], view.sessions
    tenants = of_session(sessions.tenant[: sessions.size], raised_by)
    return np.where(raised_by == NO_ROW, NO_ROW, tenants)


def _sums_of_its_kind(kinds: Rows, costs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 ``[n]``: the costs of those of its kind up to each, its own among them."""
    order = np.argsort(kinds, kind="stable")
    in_order, sums = kinds[order], np.cumsum(costs[order])
    starts = np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))
    before = sums[starts] - costs[order][starts]
    found = np.empty(len(kinds), dtype=np.int64)
    found[order] = sums - np.repeat(before, np.diff(starts, append=len(kinds)))
    return found


def is_reserved(view: View, picked: Selection) -> Mask:
    """Return whether the block's session has room reserved in the view's engine, bool
    ``[len(picked)]``.

    Sessions that returned before have room, those active last first, as long as the blocks of their
    last prompts together stay within ``Rules.reserved``. Sessions that ended or are unlikely to
    return have none, nor do abandoned branches.
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


_T = TypeVar("_T", bound=np.generic)
Ranks = npt.NDArray[np.int8]

SCORE_BOUND: Final = 1e7
"""The largest size of a policy's score; a larger one is clipped to it. Chosen."""

_STEP: Final = 2.0**25
"""Points of score from one rank to the next: more than two bounds, so that ranks never overlap, and
small enough that a float64 distinguishes blocks of one rank by a ten-millionth of a point."""


class Rule(NamedTuple):
    """A rule: ``weight`` is added to the rank of the blocks to which it ``applies``."""

    name: str
    weight: int
    applies: Callable[[View, Selection], Mask]
    # Whether it applies only in an engine with copies: in others every eviction costs a
    # recomputation, which the policy weighs already.
    with_copies: bool = False
    bounded: bool = False  # whether it applies to a share of a pool only; see `limited_by`


def is_superseded(view: View, picked: Selection) -> Mask:
    """Return whether only an abandoned branch used the block."""
    return flagged(view, picked, BlockFlag.SUPERSEDED)


def is_over(view: View, picked: Selection) -> Mask:
    """Return whether only sessions that ended used the block."""
    sessions = view.sessions
    ended = sessions.state[: sessions.size] == SessionState.ENDED
    if not ended.any():
        return np.zeros(len(picked), dtype=np.bool_)
    over = of_session(ended, picked.of(view.blocks.session))
    over &= ~flagged(view, picked, BlockFlag.SHARED)
    return over


def is_due(view: View, picked: Selection) -> Mask:
    """Return whether the block's session waits for a tool and is expected within the horizon."""
    sessions = view.sessions
    due = np.zeros(sessions.size, dtype=np.bool_)
    due[sessions.soon(view.rules.horizon_s, view.now)] = True
    return of_session(due, picked.of(view.blocks.session))


def is_pinned(view: View, picked: Selection) -> Mask:
    """Return whether the block has a lease that has not expired."""
    return np.asarray(picked.of(view.blocks.pinned_until) > view.now)


def is_protected(view: View, picked: Selection) -> Mask:
    """Return whether the block's layer is protected, and a session is likely to request it again.
    If an operator sets the share that is kept, a session that has not ended suffices.

    A block whose layer was only inferred must also have been used more than once.
    """
    protected = np.take(layer_mask(view.rules.protected_layers), picked.of(view.blocks.layer))
    if not protected.any():
        return np.asarray(protected)
    inferred = protected & is_inferred(view, picked)
    if inferred.any():
        again = picked.of(view.blocks.walkers) > 1
        protected &= ~inferred | (again & (view.rules.inferred_share > 0))
    told = ~inferred & (view.rules.protected_share is not None)
    return np.asarray(protected & (told | is_wanted(view, picked)) & ~is_over(view, picked))


def beyond_share(view: View) -> Rows:
    """Return rows in the pool of the view's engine that have a protected layer or a lease, but are
    evicted like others, because there are more of them than may be kept.
    """
    resident = view.blocks.holding(view.engine)
    return np.asarray(resident.rows[limits_of_kept(view, resident) != Limit.NONE])


def limits_of_kept(view: View, picked: Selection) -> npt.NDArray[np.uint8]:
    """Return, for each protected or leased block, the ``Limit`` that excludes it, uint8
    ``[len(picked)]``; all of ``picked`` are in the pool.
    """
    return limited_by(view, picked, is_protected(view, picked), is_pinned(view, picked))


RULES: Final = (
    Rule("superseded", 4, is_superseded),
    Rule("session_over", 2, is_over),
    Rule("due", -1, is_due, with_copies=True),
    Rule("reserved", -8, is_reserved),
    Rule("pinned", -16, is_pinned, bounded=True),
    Rule("protected_layer", -32, is_protected, bounded=True),
)
"""Higher ranks go first. This list is complete: rankings and explanations use it."""

PROTECTED_BELOW: Final = (sum(min(0, rule.weight) for rule in RULES[:-1]) - 0.5) * _STEP
"""Under the rules, protected blocks score below this, all others above."""


def lay_rules(scores: Scores, view: View, picked: Selection, there: Mask | None = None) -> Scores:
    """Return a policy's scores with the rules applied, float64 ``[len(picked)]``, for blocks that
    the view's engine holds; ``scores`` is not changed. ``there``, bool, marks those in the pool;
    None: all.
    """
    ruled = _in_band(scores)
    ranks = _ranks(view, picked, there)
    if ranks.any():
        places = np.flatnonzero(ranks)  # few: most blocks are like most others
        ruled[places] += ranks[places] * _STEP
    return ruled


def standings(view: View, picked: Selection) -> list[list[str]]:
    """Return the names of the rules that apply to each of ``picked`` in its engine's ranking, in
    the rules' order; in a view of no engine, those that apply wherever the blocks are held.
    """
    binding = [rule for rule in RULES if not rule.with_copies or _has_copies(view)]
    names = [rule.name for rule in binding]
    each_rule = [rule.applies(view, picked).tolist() for rule in binding]
    columns = zip(*each_rule, strict=True)
    return [[name for name, it in zip(names, each, strict=True) if it] for each in columns]


def _has_copies(view: View) -> bool:
    blocks = view.blocks
    if view.engine == NO_ROW or not blocks.had_copies:
        return blocks.had_copies
    return bool((blocks.tiers[view.engine] & COPIES).any())


def flagged(view: View, picked: Selection, flag: BlockFlag) -> Mask:
    """Return which blocks carry a flag, bool ``[len(picked)]``."""
    return np.asarray((picked.of(view.blocks.flags) & int(flag)) != 0)


def of_session(values: npt.NDArray[_T], session: Rows) -> npt.NDArray[_T]:
    """Return ``values``, which has one for each session row, at ``session``, ``[n]``; 0 for
    ``NO_ROW``.
    """
    padded = np.append(values, values.dtype.type(0))  # the last one stands for NO_ROW
    return np.take(padded, session, mode="wrap")


def _in_band(scores: npt.NDArray[Any]) -> Scores:
    """A copy clipped to ``±SCORE_BOUND``; NaN counts as the median of the others."""
    banded = np.clip(np.asarray(scores, dtype=np.float64), -SCORE_BOUND, SCORE_BOUND)
    nonsense = np.isnan(banded)
    if nonsense.any():
        known = banded[~nonsense]
        banded[nonsense] = np.median(known) if known.size else 0.0
    return banded


def _ranks(view: View, picked: Selection, there: Mask | None) -> Ranks:
    """int8 ``[len(picked)]``: the weights of the rules that apply to each, summed."""
    ranks = np.zeros(len(picked), dtype=np.int8)
    has_copies = view.blocks.had_copies
    if has_copies:
        has_copies = bool((view.blocks.own_tiers(view.engine, picked) & COPIES).any())
    protected, leased = is_protected(view, picked), is_pinned(view, picked)
    kept = protected | leased
    if kept.any():
        kept &= limited_by(view, picked, protected, leased, there) == Limit.NONE
    bounded: dict[Callable[[View, Selection], Mask], Mask] = {
        is_protected: protected & kept,
        is_pinned: leased & kept,
    }
    for rule in RULES:
        if rule.with_copies and not has_copies:
            continue
        applies = bounded[rule.applies] if rule.bounded else rule.applies(view, picked)
        if applies.any():
            ranks += applies * np.int8(rule.weight)
    return ranks
