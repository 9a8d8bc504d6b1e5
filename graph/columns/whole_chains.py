"""Chains of blocks in vectors: a block is worth nothing without all that stand before it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]
Scores = npt.NDArray[np.float64]

APART: Final = 1024.0  # more than chains lower a score by, however long they are
DEPTH_TIE: Final = 1e-5
"""Of a score, for each block before one in its chain: of equals the deeper goes first, as when vLLM
frees a request tail first."""
_AT_ONCE: Final = 1 << 14  # scores that are lowered together: they stay in a core's cache; chosen


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
