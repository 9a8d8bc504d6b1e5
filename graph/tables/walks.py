"""Which blocks requests walked, in order: what a shadow of an engine's pool replays."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import Struct

from ..compiled import core
from ..types import NEVER, NO_ROW, Rows, SessionState, StopReason
from ..wire.events import AdmissionReport, AdviceApplied, EngineHello, Pressure, TierReport
from .blocks import BlockTable, Mask
from .columns import distinct
from .sessions import SessionTable

MAX_WALKS: Final = 65_536
"""Kept for one engine between two rankings; at 200 requests a second, those of minutes; chosen."""


class Walk(Struct, frozen=True, gc=False):
    """A request's pass down its chain, noted at its start and at its end."""

    rows: Rows  # int32, its chain's block rows, the first block first
    reach: int  # how many of them a prefix match could have covered
    found: int  # how many of them the engine's pool held; -1 at the request's end


class WalkLog:
    """Walks by engine since they were last taken; nothing is kept of engines nobody watches."""

    def __init__(self) -> None:
        self._walks: dict[int, deque[Walk]] = {}

    def watch(self, engine: int) -> bool:
        """Keep this engine's walks from now on; True if that is new, or begins anew."""
        new = engine not in self._walks
        if new:
            self._walks[engine] = deque(maxlen=MAX_WALKS)
        return new

    def watches(self, engine: int) -> bool:
        """Whether this engine's walks are kept."""
        return engine in self._walks

    def add(self, engine: int, walk: Walk) -> None:
        """Note a walk; beyond ``MAX_WALKS`` the oldest is dropped."""
        walks = self._walks.get(engine)
        if walks is not None:
            walks.append(walk)

    def take(self, engine: int) -> list[Walk]:
        walks = self._walks.get(engine)
        if not walks:
            return []
        taken = list(walks)
        walks.clear()
        return taken

    def forget(self, engine: int) -> None:
        self._walks.pop(engine, None)


# What engines computed, and how much of it they had held before: the price of a small pool.


@dataclass(slots=True)
class Prompts:
    asked: int = 0  # blocks of all prompts
    computed: int = 0  # of these
    again: int = 0  # of those, though they had been computed before
    # When the engine last came or emptied its cache: blocks lost by that are not counted.
    cleared: float = NEVER


class RegretBook:
    """Counts prompt blocks, and those computed again, per engine since its start."""

    def __init__(self) -> None:
        self._engines: dict[int, Prompts] = {}

    def note(self, engine: int, asked: int, computed: int, again: int, last_seen: float) -> None:
        """Note that a prompt of ``asked`` blocks started, ``again`` of which are computed once
        more.

        Args:
            last_seen: When its session was last heard of before.
        """
        prompts = self._engines.get(engine)
        if prompts is None:
            prompts = self._engines[engine] = Prompts()
        prompts.asked += asked
        prompts.computed += computed
        if last_seen >= prompts.cleared:
            prompts.again += again

    def clear(self, engine: int, now: float) -> None:
        self._engines.setdefault(engine, Prompts()).cleared = now

    def of(self, engine: int) -> Prompts:
        return self._engines.get(engine) or Prompts()

    def forget(self, engine: int) -> None:
        self._engines.pop(engine, None)


# What engines last reported about themselves.


@dataclass(slots=True)
class EngineReports:
    """The latest message of each kind that an engine sent about itself; None before the first."""

    hello: EngineHello | None = None
    pressure: Pressure | None = None
    applied: AdviceApplied | None = None
    tiers: TierReport | None = None
    admission: AdmissionReport | None = None

    @property
    def prefill_tokens_per_s(self) -> float:
        """The engine's speed in tokens per second while it computes prompts; 0: not measured yet.
        An engine with tiers measures it by when steps end, another one by when they begin.
        """
        for report in (self.tiers, self.pressure):
            if report is not None and report.prefill_tokens_per_s:
                return report.prefill_tokens_per_s
        return 0.0

    @property
    def may_have_tiers(self) -> bool:
        """Whether it has tiers, or has not said yet whether it does."""
        return self.tiers is not None or self.pressure is None

    @property
    def copy_room(self) -> int:
        """Blocks that its host memory and disk can hold; 0: it has neither."""
        return 0 if self.tiers is None else self.tiers.warm_capacity + self.tiers.cold_capacity


# The links of prefix chains: which block is whose parent, who walked a link, and running sums.
#
# TEMPORAL and PREFIX_SHARE edges are these links, as ``all_edges`` shows them; the sums are
# columns of the block table, so that a score never walks links.

_ONE = np.uint32(1)


class ChainLinks:
    """The one writer of ``parent``, ``walkers`` and the columns that sum them up."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks

    def link(self, rows: Rows, parents: Rows) -> None:
        """Give parents to rows that have none; if a row is given two, it gets the first."""
        blocks, parent = self._blocks, self._blocks.parent
        parent[rows[::-1]] = parents[::-1]
        if not (rows[1:] > rows[:-1]).all():
            rows = distinct(rows)
        parents, walkers = parent[rows], blocks.walkers[rows]
        np.add.at(blocks.children, parents, _ONE)
        shared = walkers >= 2
        if shared.any():
            np.add.at(blocks.shared_children, parents[shared], _ONE)
            np.add.at(blocks.children_walks, parents[shared], walkers[shared])

    def walk(self, rows: Rows, hits: int, size: int, now: float) -> None:
        """Note that one more request walked these rows, no row twice, in blocks of ``size`` tokens,
        and that it found the first ``hits`` of them.
        """
        core.walk(self._blocks, rows, hits, size, now)

    def releasing(self, gone: Mask) -> Iterator[None]:
        """Remove all links of the rows of which ``gone``, bool ``[blocks.size]``, is true, and
        which are about to be reused; slice by slice.
        """
        for part in self._blocks.parts():
            core.unlink(self._blocks, gone, part.start, part.stop)
            yield


# Sessions that were forked from others: a subagent begins with what its parent has said.

_KEPT: Final = 65_536  # forks that are remembered, the last ones; chosen


class ForkBook:
    """Knows which session waits for which fork.

    While a fork is at work, its parent waits for it: the parent is expected as soon as the fork has
    ended its turn, and not before. What a caller states of the parent stands: once anything else
    than our last word is expected of a parent, we say no more of it until it is forked again.
    """

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        self._parents: OrderedDict[int, tuple[str, int, str]] = OrderedDict()
        self._said: dict[int, float] = {}  # parent → the return that we wrote last

    def forked(self, child: int, parent: int) -> None:
        """Note that ``child`` began with what is ``parent``'s alone."""
        names = self._sessions.names
        if not self._stands(parent):
            self._said.pop(parent, None)
        self._parents[child] = names[child], parent, names[parent]
        if len(self._parents) > _KEPT:
            self._parents.popitem(last=False)

    def parent_of(self, child: int) -> int:
        """The session that waits for this one, or ``NO_ROW``; rows are reused, so names count."""
        if child not in self._parents:
            return NO_ROW
        name, parent, parents_name = self._parents[child]
        names = self._sessions.names
        return parent if names[child] == name and names[parent] == parents_name else NO_ROW

    def works(self, child: int, now: float) -> None:
        """Note that a request of ``child`` began or ended."""
        parent = self.parent_of(child)
        if parent == NO_ROW or not self._may_say(parent):
            return
        sessions = self._sessions
        over = (
            sessions.state[child] == SessionState.ENDED
            or sessions.stop[child] == StopReason.END_OF_TURN
        )
        at_rest = sessions.running[child] == 0
        rest = float(sessions.gap[child]) if sessions.gap[child] > 0 else _UNKNOWN_S
        sessions.expected_return[parent] = now if at_rest and over else now + rest
        self._said[parent] = float(sessions.expected_return[parent])

    def _stands(self, parent: int) -> bool:
        """Whether the parent's expected return is still our word."""
        return self._said.get(parent) == float(self._sessions.expected_return[parent])

    def _may_say(self, parent: int) -> bool:
        """Whether the parent waits, and nobody else has said until when."""
        sessions = self._sessions
        if sessions.state[parent] != SessionState.WAITING_FOR_TOOL:
            return False
        if parent in self._said:
            return self._stands(parent)
        return bool(sessions.expected_return[parent] == NEVER)


_UNKNOWN_S: Final = 10.0  # until the next turn of a fork that has had one only; chosen
