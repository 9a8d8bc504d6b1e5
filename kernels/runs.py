"""Plans copies between two layouts in the longest contiguous runs that both share."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from .errors import LayoutError
from .layout import Blocks, KvLayout, Plane, SlotMap
from .tensors import Bools, Int64s, Integers, Tensor


class CopyPlan(NamedTuple):
    """How a block's bytes in one layout map to another's: runs that repeat over axes."""

    run: int  # elements of one contiguous run
    axes: list[tuple[int, int, int]]  # (extent, source stride, target stride) of each repetition


def copy_plan(source: KvLayout, target: KvLayout) -> CopyPlan:
    """Return the longest runs in which whole blocks are copied. Raises LayoutError."""
    check_same_model(source, target)
    if source.dtype != target.dtype or _interior(source) != _interior(target):
        raise LayoutError(
            f"{source.name} ({source.dtype}) and {target.name} ({target.dtype}) differ inside a"
            " block: splice converts, spill and load copy"
        )
    axes = [
        (extent, stride, other)
        for (extent, stride), (_, other) in zip(source.axes(), target.axes(), strict=True)
        if extent > 1
    ]
    axes.sort(key=lambda axis: axis[1])
    run = source.unit
    while axes and axes[0][1] == axes[0][2] == run:
        run *= axes.pop(0)[0]
    return CopyPlan(run, axes)


class ByteRuns(NamedTuple):
    """The runs of a copy, all of one size."""

    sources: Int64s  # [R], byte offsets in the source memory
    targets: Int64s  # [R], byte offsets in the target memory
    size: int  # bytes of one run


def block_runs(source: Blocks, target: Blocks) -> ByteRuns:
    """Return the runs that copy whole blocks between two memories; raises as ``copy_plan``."""
    plan = copy_plan(source.layout, target.layout)
    sources, targets = (
        _starts(blocks, [(axis[0], axis[which]) for axis in plan.axes])
        for blocks, which in ((source, 1), (target, 2))
    )
    return ByteRuns(sources, targets, plan.run * source.layout.itemsize)


def _starts(blocks: Blocks, axes: list[tuple[int, int]]) -> Int64s:
    layout = blocks.layout
    starts = torch.as_tensor(blocks.numbers, dtype=torch.int64).cpu().numpy() * layout.block_stride
    for extent, stride in axes:
        starts = np.add.outer(np.arange(extent) * stride, starts)
    return np.ascontiguousarray(starts.reshape(-1) * layout.itemsize)


def check_same_model(source: KvLayout, target: KvLayout) -> None:
    """Raise ``LayoutError`` unless both hold K and V of the same layers and heads."""
    for what in ("layers", "heads", "tokens"):
        if getattr(source, what) != getattr(target, what):
            raise LayoutError(
                f"{source.name} has {getattr(source, what)} {what}, "
                f"{target.name} {getattr(target, what)}; they must be equal"
            )
    if (source.key.dims, source.value.dims) != (target.key.dims, target.value.dims):
        raise LayoutError(f"{source.name} and {target.name} differ in head size")


def _interior(layout: KvLayout) -> tuple[Plane, Plane]:
    if layout.interleaved:
        return layout.key, layout.value
    return replace(layout.key, token_outer=0), replace(layout.value, token_outer=0)


class SlotRuns(NamedTuple):
    """A slot map cut into runs, where either side leaves its block or Δ changes."""

    runs: Int64s  # [R, 4]: source slot, target slot, length, row of `deltas` or −1 for Δ = 0
    deltas: Tensor  # int64 [D], each Δ once


def slot_runs(slots: SlotMap, tokens: int) -> SlotRuns:
    """Cut a slot map [T] into runs; pairs with a negative slot are left out."""
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
