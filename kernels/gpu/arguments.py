"""The arguments of each CUDA kernel, with the names and in the order of its source.

All but the numbers are addresses; 64 bits hold either.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, TypeAlias

from ..tensors import Tensor

Int64: TypeAlias = ctypes.c_int64
Arguments: TypeAlias = tuple[ctypes.c_int64 | ctypes.c_float, ...]


class MoveArguments(NamedTuple):
    """Of ``kv_move``; slots and rows are int64 [tokens], cos and sin float32 [*, pairs]."""

    source: Int64
    target: Int64
    source_layout: Int64
    target_layout: Int64
    source_slots: Int64
    target_slots: Int64
    rows: Int64
    cos: Int64
    sin: Int64
    tokens: Int64
    start: Int64
    pairs: Int64
    neox: Int64
    keys_only: Int64
    slot_bytes: Int64

    def part(
        self, start: int, count: int, source: Tensor | None = None, target: Tensor | None = None
    ) -> MoveArguments:
        """The same for ``count`` tokens from the ``start``-th on, out of or into other memory."""

        def later(column: Int64) -> Int64:
            return number(column.value + start * 8)

        return self._replace(
            source=self.source if source is None else address(source),
            target=self.target if target is None else address(target),
            source_slots=later(self.source_slots),
            target_slots=later(self.target_slots),
            rows=later(self.rows),
            tokens=number(count),
        )


class CopyArguments(NamedTuple):
    """Of ``kv_copy``; sources and targets are int64 [runs], offsets in bytes."""

    source: Int64
    target: Int64
    sources: Int64
    targets: Int64
    runs: Int64
    run_bytes: Int64


class MassArguments(NamedTuple):
    """Of ``attention_mass``; mass and peaks are float32 [S, query heads, width]."""

    memory: Int64
    paged: Int64
    layer: Int64
    queries: Int64
    table: Int64
    lengths: Int64
    scale: ctypes.c_float
    query_heads: Int64
    width: Int64
    mass: Int64
    peaks: Int64


class ConfidenceArguments(NamedTuple):
    """Of ``confidence``; out is float32 [rows, 3]."""

    logits: Int64
    stride: Int64
    vocabulary: Int64
    out: Int64


def address(tensor: Tensor) -> Int64:
    """The address of a tensor's first element."""
    return Int64(tensor.data_ptr())


def number(value: int) -> Int64:
    """A number as kernels take it."""
    return Int64(int(value))
