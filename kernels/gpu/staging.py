"""A splice in two overlapping steps, through the GPU's memory.

The copy engine brings whole records into the GPU's memory, and a kernel rotates and scatters them
from there while the next ones travel; or a kernel gathers and quantises whole records there, and
the copy engine takes them away. For machines where multiprocessors reach host memory more slowly
than the copy engine does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch

from ..layout.layout import PagedKv
from ..tensors import Tensor

MOST_BYTES: Final = 16 << 20  # of a chunk: long enough to hide the cost of queueing one; chosen
LEAST_BYTES: Final = 4 << 20  # of a chunk: queueing one takes about as long as copying it; chosen
_DENSE: Final = 0.75  # with a smaller share of wanted tokens, whole records are a waste; chosen


class Chunks(NamedTuple):
    """Which records travel together, and where their tokens then stand.

    Attributes:
        records: int64 [n], each once, chunk after chunk.
        starts: Where each chunk begins among the records; the last is their number.
        order: int64 [T], the tokens' numbers in the order of their chunks.
        slots: int64 [T], in that order: slots in the chunk's buffer.
        ends: Tokens up to the end of each chunk.
    """

    records: Tensor
    starts: list[int]
    order: Tensor
    slots: Tensor
    ends: list[int]

    def of(self, number: int) -> slice:
        """Where a chunk's records are among all."""
        return slice(self.starts[number], self.starts[number + 1])

    @property
    def places(self) -> Tensor:
        """int64 [n], where each record stands in its chunk's buffer."""
        starts = np.array(self.starts)
        first = np.repeat(starts[:-1], np.diff(starts))
        return torch.from_numpy(np.arange(len(first)) - first)

    @property
    def largest(self) -> int:
        """Records of the largest chunk."""
        return max(after - before for before, after in pairwise(self.starts))


def chunks(
    kv: PagedKv, slots: Tensor, falling: bool, most: int = MOST_BYTES, least: int = LEAST_BYTES
) -> Chunks:
    """Cut a splice from, or to, ``slots`` [T] of ``kv`` into chunks of whole records.

    Args:
        slots: None of them negative.
        falling: Whether the last chunks are the small ones: what follows a chunk's copy, or comes
            before it, overlaps with nothing at that end.
        most: Bytes of a chunk at most, about; ``least`` likewise.
    """
    layout = kv.layout
    numbers = slots.numpy()
    records, place = np.unique(numbers // layout.tokens, return_inverse=True)
    sizes = graded(len(records), *(max(1, size // layout.block_bytes) for size in (most, least)))
    starts = np.cumsum([0, *(sizes if falling else reversed(sizes))])
    chunk = np.searchsorted(starts, place, side="right") - 1
    order = np.argsort(chunk, kind="stable")
    staged = (place - starts[chunk]) * layout.tokens + numbers % layout.tokens
    counts = np.bincount(chunk, minlength=len(sizes))
    return Chunks(
        torch.from_numpy(records), starts.tolist(), torch.from_numpy(order),
        torch.from_numpy(staged[order]), np.cumsum(counts).tolist(),
    )  # fmt: skip


def graded(count: int, most: int, least: int) -> list[int]:
    """Sizes that add up to ``count``: as large as allowed, and towards the end half of what is
    left."""
    sizes = []
    while count:
        sizes.append(min(count, max(least, min(most, -(-count // 2)))))
        count -= sizes[-1]
    return sizes


def worth_staging(far: PagedKv, parts: Chunks) -> bool:
    """Whether most tokens of the records that are touched are wanted."""
    touched = len(parts.records) * far.layout.tokens
    return touched > 0 and len(parts.order) >= _DENSE * touched


def fills_records(far: PagedKv, parts: Chunks) -> bool:
    """Whether the tokens, none of them twice, are all of the records that they touch: whole records
    can then take the place of what stood there."""
    return 0 < len(parts.records) * far.layout.tokens == len(parts.order)
