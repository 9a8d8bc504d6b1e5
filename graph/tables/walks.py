"""Which blocks requests walked, in order, for replay by a simulated copy of an engine's pool."""

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
"""Walks kept per engine between two rankings: minutes at 200 requests a second; chosen."""


class Walk(Struct, frozen=True, gc=False):
    """A request's pass down its chain, noted at its start and at its end."""

    rows: Rows  # int32, the block rows of its chain, the first block first
    reach: int  # how many of them a prefix match could have covered
    found: int  # how many of them the engine's pool held; -1 at the request's end
    copied: int = 0  # of how many after these it had copies, from the first on


class WalkLog:
    """Walks by watched engine since they were last taken."""

    def __init__(self) -> None:
        self._walks: dict[int, deque[Walk]] = {}

    def watch(self, engine: int) -> bool:
        """Keep this engine's walks from now on; returns True if they were not kept before."""
        new = engine not in self._walks
        if new:
            self._walks[engine] = deque(maxlen=MAX_WALKS)
        return new

    def watches(self, engine: int) -> bool:
        """Return whether this engine's walks are kept."""
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


# How much engines computed, and how much of it a second time: the price of a small pool.


@dataclass(slots=True)
class Prompts:
    asked: int = 0  # blocks of all prompts
    computed: int = 0  # blocks computed, of these
    again: int = 0  # blocks computed again, of these
    # Time when the engine last started or emptied its cache; earlier losses are not counted.
    cleared: float = NEVER


class RegretBook:
    """Counts blocks of prompts, and blocks computed again, per engine since its start."""

    def __init__(self) -> None:
        self._engines: dict[int, Prompts] = {}

    def note(self, engine: int, asked: int, computed: int, again: int, last_seen: float) -> None:
        """Note that a prompt of ``asked`` blocks started, ``again`` of which are computed once
        more.

        Args:
            last_seen: Time when its session was last active before.
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


@dataclass(slots=True)
class EngineReports:
    """An engine's latest report of each kind about itself; None before the first."""

    hello: EngineHello | None = None
    pressure: Pressure | None = None
    applied: AdviceApplied | None = None
    dropped_at: float = NEVER  # when ``applied`` last counted more dropped events
    tiers: TierReport | None = None
    admission: AdmissionReport | None = None

    def note_applied(self, report: AdviceApplied, now: float) -> None:
        if report.dropped > (self.applied.dropped if self.applied is not None else 0):
            self.dropped_at = now
        self.applied = report

    @property
    def prefill_tokens_per_s(self) -> float:
        """The engine's prefill speed in tokens per second; 0: not measured yet. Engines with tiers
        measure it by when steps end, others by when steps begin.
        """
        for report in (self.tiers, self.pressure):
            if report is not None and report.prefill_tokens_per_s:
                return report.prefill_tokens_per_s
        return 0.0

    @property
    def may_have_tiers(self) -> bool:
        """Whether the engine has tiers, or has not reported yet."""
        return self.tiers is not None or self.pressure is None

    @property
    def copy_room(self) -> int:
        """Blocks that its host memory and disk can hold; 0 without either."""
        return 0 if self.tiers is None else self.tiers.warm_capacity + self.tiers.cold_capacity


# The links of prefix chains: each block's parent, the requests that walked the link, and sums.
#
# ``all_edges`` shows these links as TEMPORAL and PREFIX_SHARE edges. The sums are columns of the
# block table, so that scoring never walks links.

_ONE = np.uint32(1)


class ChainLinks:
    """The only writer of ``parent``, ``walkers`` and the columns that sum them up."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks

    def link(self, rows: Rows, parents: Rows) -> None:
        """Give parents to rows that have none; a row listed twice gets its first parent."""
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
        and found the first ``hits`` of them in the cache.
        """
        core.walk(self._blocks, rows, hits, size, now)

    def releasing(self, gone: Mask) -> Iterator[None]:
        """Remove, in slices of work, all links of the rows for which ``gone``, bool
        ``[blocks.size]``, is true, which are about to be reused.
        """
        for part in self._blocks.parts():
            core.unlink(self._blocks, gone, part.start, part.stop)
            yield


# Sessions forked from others: a subagent starts with its parent's context.

_KEPT: Final = 65_536  # latest forks remembered; chosen


class ForkBook:
    """Tracks which session waits for which fork.

    While a fork is running, its parent waits for it: the parent is expected once the fork has ended
    its turn, and not before. A caller's statement about the parent takes precedence: once its
    expected return differs from the one set here, nothing is set until it is forked again.
    """

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        self._parents: OrderedDict[int, tuple[str, int, str]] = OrderedDict()
        self._said: dict[int, float] = {}  # parent → the return that we wrote last

    def forked(self, child: int, parent: int) -> None:
        """Note that ``child`` started with context that only ``parent`` has."""
        names = self._sessions.names
        if not self._stands(parent):
            self._said.pop(parent, None)
        self._parents[child] = names[child], parent, names[parent]
        if len(self._parents) > _KEPT:
            self._parents.popitem(last=False)

    def parent_of(self, child: int) -> int:
        """Return the session that waits for this one, by name as rows are reused, or ``NO_ROW``."""
        if child not in self._parents:
            return NO_ROW
        name, parent, parents_name = self._parents[child]
        names = self._sessions.names
        return parent if names[child] == name and names[parent] == parents_name else NO_ROW

    def works(self, child: int, now: float) -> None:
        """Note that a request of ``child`` started or ended."""
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


_UNKNOWN_S: Final = 10.0  # until the next turn of a fork with only one so far; chosen
