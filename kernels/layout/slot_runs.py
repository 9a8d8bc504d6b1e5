"""Slot maps as runs: consecutive tokens that stay within one block on both sides."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..tensors import Bools, Int64s, Integers, Tensor
from .addressed import SlotMap


class SlotRuns(NamedTuple):
    """A slot map, cut where either side leaves its block or Δ changes.

    Attributes:
        runs: int64 [R, 4]: source slot, target slot, length, row of ``deltas`` or −1 for Δ = 0.
        deltas: int64 [D], each Δ once.
    """

    runs: Int64s
    deltas: Tensor


def slot_runs(slots: SlotMap, tokens: int) -> SlotRuns:
    """Cut a slot map [T] into runs; pairs in which either slot is negative are left out.

    Args:
        tokens: Tokens per block.
    """
    old, new, moved = (_array(column) for column in slots.kept())
    deltas, rows = np.unique(moved, return_inverse=True)
    rows = np.where(moved == 0, -1, rows)
    if not len(old):
        return SlotRuns(np.empty((0, 4), np.int64), torch.zeros(1, dtype=torch.int64))
    starts = np.flatnonzero(np.concatenate([[True], _breaks(old, new, rows, tokens)]))
    lengths = np.diff(np.append(starts, len(old)))
    runs = np.stack([old[starts], new[starts], lengths, rows[starts]], axis=1)
    return SlotRuns(np.ascontiguousarray(runs, np.int64), torch.from_numpy(deltas))


def _breaks(old: Int64s, new: Int64s, rows: Integers, tokens: int) -> Bools:
    found: Bools = (
        (np.diff(old) != 1)
        | (np.diff(new) != 1)
        | (np.diff(rows) != 0)
        | (old[1:] % tokens == 0)
        | (new[1:] % tokens == 0)
    )
    return found


def _array(values: Tensor) -> Int64s:
    found: Int64s = torch.as_tensor(values, dtype=torch.int64).cpu().numpy()
    return found
