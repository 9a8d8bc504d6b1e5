"""Copies of the columns to be ranked: taken under the graph's lock, in parts, and ranked without
it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..tables.blocks import DEPTH_TIE, Mask, Selection, keep_chains_whole
from ..tables.edges import AllEdges
from ..tables.front import Front
from ..types import Rows
from .policy import Policy, Scores, View
from .rules import which_are_named

Detach = Callable[[View, Rows], Policy]


class CopiedColumns(NamedTuple):
    """A copy of some blocks' columns at one moment, so that they are scored without the graph's
    lock.

    Attributes:
        live: The view and the rows of which it is a copy.
        detached: The policy that scores the copy; None: it reads more of the graph than the copy
            has, and scores ``live``, with the lock held.
    """

    view: View
    front: Front
    live: tuple[View, Rows]
    detached: Policy | None

    @property
    def every(self) -> Selection:
        return self.front.every

    def scores(self, policy: Policy) -> Scores:
        if self.detached is not None:
            return self.detached.scores(self.view, self.every)
        view, rows = self.live
        with view.lock:
            return policy.scores(view, Selection(view.blocks, rows))

    def whole(self, scores: Scores) -> Scores:
        return keep_chains_whole(scores, self.every.parents(), self.front.lengths)

    def by_block(self, scores: Scores) -> Scores:
        """Expand scores of runs to scores of their blocks, float64 ``[n]``."""
        lengths = self.front.lengths
        if lengths is None:
            return scores
        found = np.arange(len(self.live[1]), dtype=np.float64)
        found -= np.repeat(self.front.starts, lengths)
        found *= DEPTH_TIE
        found += np.repeat(scores, lengths)
        return found


def copied(view: View, policy: Policy, rows: Rows, *, runs: bool = True) -> CopiedColumns:
    """Copy what the scores of some blocks depend on, int32 ``[n]`` rows, ascending, so that they
    can be computed without the graph's lock. With ``runs``, one row stands for each run of
    consecutive blocks that no rule can distinguish, unless the policy must be asked about ``live``.
    """
    found = _taken(view, policy, rows, runs and hasattr(policy, "detached"))
    ends: Rows | None = getattr(found.detached, "ends", None)
    front = found.front
    if front.lengths is not None and ends is not None:
        front.cut(np.take(ends, front.session, mode="wrap"))  # the last one stands for NO_ROW
    return found


def _taken(view: View, policy: Policy, rows: Rows, runs: bool) -> CopiedColumns:
    def alone(some: Rows) -> Mask:  # what is kept is counted in blocks
        return which_are_named(view, Selection(view.blocks, some))

    front, start = Front(view.blocks, view.engine, rows, alone if runs else None), 0
    with view.lock:
        start = front.take(start)
        if start == len(rows):  # as nearly always: one hold for all of it
            front.close()
            return _closed(view, policy, front, rows)
    while start < len(rows):
        with view.lock:
            start = front.take(start)
    front.close()  # which moves all of it once more: without the lock
    with view.lock:
        return _closed(view, policy, front, rows)


def _closed(view: View, policy: Policy, front: Front, rows: Rows) -> CopiedColumns:
    tables = copy.copy(view.tables)
    tables.blocks, tables.sessions = front, view.sessions.copied()
    tables.edges = view.tables.edges.beside(front)
    tables.all_edges = AllEdges(front, tables.edges)
    # Not isinstance: to look a protocol up takes as long as to copy a small pool.
    detach: Detach | None = getattr(policy, "detached", None)
    detached = detach(view, front.session) if detach is not None else None
    return CopiedColumns(replace(view, tables=tables), front, (view, rows), detached)
