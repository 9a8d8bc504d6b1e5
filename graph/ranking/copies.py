"""Admission to the colder tiers: which blocks are worth a copy before the engine loses them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..tables.blocks import Places, Selection
from ..tables.edges import BLOCK_TO_BLOCK, STORED
from ..tables.sessions import SessionTable
from ..tables.tables import Tables
from ..types import HELD, NO_ROW, BlockFlag, Rows, SessionState, Tier
from .policy import View

Mask = npt.NDArray[np.bool_]
Outlooks = npt.NDArray[np.uint8]

COPIES: Final = int(Tier.WARM | Tier.COLD)
_UNLIKELY, _OVER = 1, 2
# A session whose return is less probable is not worth copies of blocks that were never hit. Both
# chosen: recorded agents that state nothing find more with .1 than with .5 in the replay lab.
_LIKELY: Final = 0.1
_RETURN_MEMORY_S: Final = 300.0  # silence after which a return becomes unlikely; chosen


def worth_spilling(tables: Tables, rows: Rows, now: float) -> Mask:
    """Return whether these blocks are likely to be requested again, bool ``[len(rows)]``.

    A block is worth a copy if nothing is known of it, so that without knowledge an engine does as
    it would without the graph.
    """
    superseded, over, unlikely = not_worth(tables, rows, now).values()
    superseded |= over
    superseded |= unlikely
    return np.invert(superseded, out=superseded)


def not_worth(tables: Tables, rows: Rows, now: float) -> dict[str, Mask]:
    """Return the reasons against a copy, each with a bool ``[len(rows)]`` that marks where it
    applies.

    A block that several sessions share outlives any of them. A block that was never hit is kept for
    a session that is running, waits for a tool, or is otherwise likely to return, because its last
    output is part of its next prompt.
    """
    blocks = tables.blocks
    flags = np.take(blocks.flags, rows)
    session = np.take(blocks.session, rows)
    outlook = _outlooks(tables, session, now)
    outlook *= (flags & int(BlockFlag.SHARED)) == 0
    never_hit = np.take(blocks.hit_count, rows) == 0
    return {
        "superseded": (flags & int(BlockFlag.SUPERSEDED)) != 0,
        "session_over": outlook == _OVER,
        "not_likely_to_return": (outlook == _UNLIKELY) & never_hit,
    }


def _outlooks(tables: Tables, wanted: Rows, now: float) -> Outlooks:
    """uint8 ``[len(wanted)]``: what is expected of these sessions; 0: a return.

    Nothing is known of blocks that no session walked (NO_ROW). Of few, only they are looked at: an
    eviction asks, too.
    """
    sessions = tables.sessions
    if 4 * len(wanted) < sessions.size:
        rows, place = np.unique(wanted, return_inverse=True)
        found = _expected(sessions, rows, now)
        found[rows == NO_ROW] = 0
        return np.asarray(found[place])
    rows = sessions.among(wanted)
    outlooks = np.zeros(sessions.size + 1, dtype=np.uint8)  # the last one stands for NO_ROW
    outlooks[rows] = _expected(sessions, rows, now)
    return np.take(outlooks, wanted, mode="wrap")


def _expected(sessions: SessionTable, rows: Rows, now: float) -> Outlooks:
    """uint8 ``[len(rows)]``: what is expected of each."""
    unlikely = sessions.credit(now, _RETURN_MEMORY_S, rows) < _LIKELY
    unlikely &= sessions.turns[rows] > 0  # of one that never began, as little
    outlooks = unlikely * np.uint8(_UNLIKELY)
    outlooks[sessions.state[rows] == SessionState.ENDED] = _OVER
    return np.asarray(outlooks)


# ``CopyOrder``: which copies in host memory are dropped first, live and in the replay lab.

K = TypeVar("K", bound=Hashable)


class CopyOrder(Generic[K]):
    """The order in which copies are dropped, named by their blocks. A ``plain`` order is by least
    recent use, whatever is in use or advised.

    First come copies of blocks in use: these bytes are stored twice, and can be copied again when
    the block is about to be evicted. Then come those that advice names, then the others, those
    evicted longest ago first. So pool and memory hold different blocks, as many as both have room
    for.
    """

    def __init__(self, plain: bool = False) -> None:
        self._plain = plain
        self._twice: OrderedDict[K, None] = OrderedDict()
        self._once: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._twice) + len(self._once)

    def __contains__(self, block: object) -> bool:
        return block in self._once or block in self._twice

    def __iter__(self) -> Iterator[K]:
        return chain(self._twice, self._once)

    def add(self, block: K) -> None:
        self._once[block] = None

    def add_all(self, blocks: Iterable[K]) -> None:
        """Add copies of these blocks, which have none yet, in this order."""
        self._once.update(dict.fromkeys(blocks))

    def discard(self, block: K) -> None:
        self._once.pop(block, None)
        self._twice.pop(block, None)

    def discard_all(self, blocks: Sequence[K]) -> None:
        for copies in filter(None, (self._once, self._twice)):
            deque(map(copies.pop, blocks, repeat(None)), maxlen=0)

    def used(self, blocks: Sequence[K]) -> None:
        """Note that a request uses this chain in the pool; copies of its tail are dropped before
        those of its head.
        """
        once, twice = self._once, self._twice
        if not twice and once.keys().isdisjoint(blocks):
            return
        to, other = (once, twice) if self._plain else (twice, once)
        for block in reversed(blocks):
            if block in to:
                to.move_to_end(block)
            elif block in other:
                del other[block]
                to[block] = None

    def leaves(self, block: K) -> None:
        """Note that no request uses this block, and that the pool lost it or is about to. Without
        this call, copies of such blocks would replace each other endlessly.
        """
        self.all_leave((block,))

    def all_leave(self, blocks: Iterable[K]) -> None:
        """Call ``leaves`` for these blocks, in this order."""
        once, twice = self._once, self._twice
        for block in blocks:
            if block in once:
                once.move_to_end(block)
            elif block in twice:
                del twice[block]
                once[block] = None

    def stands_twice(self, block: K) -> bool:
        """Return whether the block is in use in the pool."""
        return block in self._twice

    def holds_twice(self) -> bool:
        """Return whether any copied block is in use in the pool."""
        return bool(self._twice)

    def first(self, advised: Iterable[K] = ()) -> Iterator[K]:
        """Yield block names in the order in which their copies are dropped. A name may come twice,
        and one of ``advised`` may have no copy.
        """
        return chain(self._twice, () if self._plain else advised, self._once)


# Which copies are worth loading back before any request asks for them.

Floats = npt.NDArray[np.float64]

_IN_USE_S: Final = 1.0  # a block read within these seconds belongs to the working set; chosen
_SAID: Final = 3.0  # pull of a block whose request was announced, above any guess; chosen
_PROBABLE: Final = 0.5  # least share of reads of a block in use that continued to this one; chosen
_LINKS: Final = BLOCK_TO_BLOCK & frozenset(STORED)  # the other edge types form chains
_SCHEDULED: Final = (SessionState.RUNNING, SessionState.WAITING_FOR_TOOL)


def prefetch_candidates(view: View, n: int) -> Rows:
    """Return rows with a copy that are not in the engine's pool, int32 ``[≤ n]``, best first.

    Blocks announced by a caller come first, then those of due sessions, session by session, the
    earliest return first. Then come blocks that usually follow blocks in use, or are attended with
    them. A block is listed only if all blocks before it in its chain are in the pool or earlier in
    the list.
    """
    blocks = view.blocks
    if not blocks.had_copies:
        return np.empty(0, dtype=np.int32)
    held = blocks.holding(view.engine, HELD)
    rows = held.rows[~blocks.has(view.engine, held.rows, Tier.HOT)]
    if not len(rows) or n <= 0:
        return rows[:0]
    pull = _due_pull(view, rows)
    pull[blocks.wanted_until[rows] > view.now] = _SAID
    in_use = _in_use(view)
    if in_use.any():
        np.maximum(pull, _followers_pull(view, rows, in_use), out=pull)
    if not pull.any():
        return rows[:0]
    pull *= worth_spilling(view.tables, rows, view.now)
    return _chains_first(view, held, rows, pull)[:n]


def _chains_first(view: View, held: Selection, rows: Rows, pull: Floats) -> Rows:
    """The rows with a pull and all before them in their chains, the strongest pull first. Leaves
    out blocks that could not be matched anyhow, because a block before them is not ``held``.
    """
    blocks = view.blocks
    above = held.parents()
    top = held.rows[_top(above)]
    whole = (blocks.parent[top] == NO_ROW) & (blocks.depth[top] == 0)
    lifted = np.zeros(blocks.size)
    lifted[rows] = pull
    lifted[held.rows] = _lifted(held.of(lifted), above)
    kept = np.zeros(blocks.size, dtype=np.bool_)
    kept[held.rows] = whole
    wanted = rows[kept[rows] & (lifted[rows] > 0)]
    order: Rows = wanted[np.lexsort((blocks.depth[wanted], -lifted[wanted]))]
    return order


def _top(above: Places) -> Places:
    """intp ``[n]``: the uppermost ancestor of each, by pointer doubling."""
    nobody = len(above) - 1
    top = np.arange(nobody + 1)
    while (above != nobody).any():
        top = np.where(above == nobody, top, np.take(top, above))
        above = np.take(above, above)
    return top[:-1]


def _lifted(pull: Floats, above: Places) -> Floats:
    """float64 ``[n]``: each one's pull raised to the highest among its descendants."""
    nobody = len(above) - 1
    highest = np.append(pull, 0.0)
    while (above[:-1] != nobody).any():
        np.maximum.at(highest, above[:-1], highest[:-1])
        above = np.take(above, above)
    return highest[:-1]


def _states(view: View) -> npt.NDArray[np.uint8]:
    """uint8 ``[sessions.size + 1]``; the last one, of nobody, is idle."""
    return np.append(view.sessions.state[: view.sessions.size], np.uint8(SessionState.IDLE))


def _in_use(view: View) -> Mask:
    """bool ``[blocks.size]``: the working set: just read, or of a running session."""
    blocks = view.blocks
    resident = blocks.holding(view.engine)
    running = _states(view) == SessionState.RUNNING
    read = np.take(running, resident.of(blocks.session), mode="wrap")
    read |= resident.last_used() >= view.now - _IN_USE_S
    in_use = np.zeros(blocks.size, dtype=np.bool_)
    in_use[resident.rows[read]] = True
    return in_use


def _due_pull(view: View, rows: Rows) -> Floats:
    """float64 ``[n]``: in (1, 2] for blocks of due sessions, falling from the first session to the
    last; 0 for all others.
    """
    sessions = view.sessions
    soon = sessions.soon(view.rules.horizon_s, view.now)
    pull = np.zeros(sessions.size + 1)  # the last one stands for NO_ROW
    pull[soon] = 2.0 - np.arange(len(soon)) / max(1, len(soon))
    return np.take(pull, view.blocks.session[rows], mode="wrap")


def _followers_pull(view: View, rows: Rows, in_use: Mask) -> Floats:
    """float64 ``[n]`` up to 1: how probably each block follows the working set.

    0 for blocks of running sessions, whose own requests load what they need, and of waiting
    sessions, whose return is better known.
    """
    pull = _next_pull(view, rows, in_use)
    np.maximum(pull, _linked_pull(view, rows, in_use), out=pull)
    pull[np.isin(_states(view)[view.blocks.session[rows]], _SCHEDULED)] = 0.0
    return pull


def _next_pull(view: View, rows: Rows, in_use: Mask) -> Floats:
    """float64 ``[n]`` up to 1: the share of those who walked a block in use that went on to this
    one. The block in use is the last before it in its chain that is not among ``rows`` itself.
    """
    blocks = view.blocks
    before = blocks.parent[rows[_top(Selection(blocks, rows).parents())]]
    share = blocks.walkers[rows] / np.maximum(1.0, blocks.walkers[before])
    follows = (before != NO_ROW) & in_use[before] & (share >= _PROBABLE)
    return np.where(follows, np.minimum(share, 1.0), 0.0)


def _linked_pull(view: View, rows: Rows, in_use: Mask) -> Floats:
    """float64 ``[n]`` up to 1: weight of a link to a block in use, divided by that of its strongest
    link.

    The strongest link belongs to the block that is always read with it, so the quotient estimates
    how often this one is.
    """
    blocks, edges = view.blocks, view.tables.edges
    pull = np.zeros(blocks.size)
    wanted = np.zeros(blocks.size, dtype=np.bool_)
    wanted[rows] = True
    for kind in _LINKS:
        links = edges.of_kind(kind) if edges.counts[kind] else np.empty(0, dtype=np.int32)
        source, target = edges.source[links], edges.target[links]
        out, back = in_use[source] & wanted[target], in_use[target] & wanted[source]
        used = np.concatenate([source[out], target[back]])
        found = np.concatenate([target[out], source[back]])
        if not len(used):
            continue
        weight = edges.weight[np.concatenate([links[out], links[back]])].astype(np.float64)
        share = weight / _strongest(view, links, used)
        np.maximum.at(pull, found, view.rules.edge_types.get(kind, 0.0) * share)
    return np.where(pull[rows] >= _PROBABLE, np.minimum(pull[rows], 1.0), 0.0)


def _strongest(view: View, links: Rows, used: Rows) -> npt.NDArray[np.float32]:
    """float32 ``[n]``: the weight of the strongest of ``links`` at each of ``used``."""
    edges, strongest = view.tables.edges, np.zeros(view.blocks.size, dtype=np.float32)
    is_used = np.zeros(view.blocks.size, dtype=np.bool_)
    is_used[used] = True
    for ends in (edges.source[links], edges.target[links]):
        at_used = is_used[ends]
        np.maximum.at(strongest, ends[at_used], edges.weight[links[at_used]])
    return strongest[used]
