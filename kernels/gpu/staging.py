"""A splice in two overlapping steps, through the GPU's memory.

The copy engine brings whole records into the GPU's memory, and a kernel rotates and scatters them
from there while the next ones travel. For machines where multiprocessors read host memory more
slowly than the copy engine does.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch

from ..layout.layout import PagedKv
from ..tensors import Tensor

CHUNK_BYTES: Final = 16 << 20  # long enough to hide the cost of queueing one; chosen
_DENSE: Final = 0.75  # with a smaller share of wanted tokens, whole records are a waste; chosen


class Chunks(NamedTuple):
    """Which records travel together, and where their tokens then stand.

    Attributes:
        records: int64 [n], each once, ``per_chunk`` of them to a chunk.
        per_chunk: Records of a chunk.
        order: int64 [T], the tokens' numbers in the order of their chunks.
        slots: int64 [T], in that order: slots in the chunk's buffer.
        ends: Tokens up to the end of each chunk.
    """

    records: Tensor
    per_chunk: int
    order: Tensor
    slots: Tensor
    ends: list[int]


def chunks(source: PagedKv, slots: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Chunks:
    """Cut a splice from ``slots`` [T], none of them negative, into chunks of whole records."""
    layout = source.layout
    per_chunk = max(1, chunk_bytes // layout.block_bytes)
    numbers = slots.numpy()
    records, place = np.unique(numbers // layout.tokens, return_inverse=True)
    chunk = place // per_chunk
    order = np.argsort(chunk, kind="stable")
    staged = place % per_chunk * layout.tokens + numbers % layout.tokens
    counts = np.bincount(chunk, minlength=-(-len(records) // per_chunk))
    return Chunks(
        torch.from_numpy(records), per_chunk, torch.from_numpy(order),
        torch.from_numpy(staged[order]), np.cumsum(counts).tolist(),
    )  # fmt: skip


def worth_staging(source: PagedKv, slots: Tensor) -> bool:
    """Whether most tokens of the records that ``slots`` touch are wanted."""
    wanted = slots[slots >= 0]
    touched = len(torch.unique(wanted // source.layout.tokens)) * source.layout.tokens
    return touched > 0 and len(wanted) >= _DENSE * touched
