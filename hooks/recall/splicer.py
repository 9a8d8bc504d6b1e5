"""Runs of tokens between records and an engine's blocks, as the kernels address them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels import ops
from ...kernels.errors import RopeError
from ...kernels.layout.addressed import SlotMap

if TYPE_CHECKING:
    from ...kernels.layout.layout import PagedKv
    from ...kernels.maths.rope import Rope
    from ...kernels.store.arena import Arena
    from ..tiers.jobs import Run


def slot_map(runs: Sequence[Run], record: Callable[[int], int], block_size: int) -> SlotMap:
    """Slots of all tokens of ``runs``.

    Args:
        runs: At least one.
        record: The arena's record that holds a copy.
        block_size: Tokens of a block, and of a record.
    """
    starts = [(record(run.copy) * block_size + run.first, run.slot, run.delta) for run in runs]
    counts = np.array([run.tokens for run in runs], dtype=np.int64)
    table = np.repeat(np.array(starts, dtype=np.int64), counts, axis=0)
    within = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    return SlotMap(
        torch.from_numpy(table[:, 0] + within),
        torch.from_numpy(table[:, 1] + within),
        torch.from_numpy(table[:, 2].copy()),
    )


def splicer(
    runs: Sequence[Run],
    handles: Mapping[int, int],
    arena: Arena,
    cache: PagedKv,
    rope: Rope | None,
) -> Callable[[], None]:
    """Return what brings ``runs`` to their new positions; it does nothing if there are none.

    Args:
        runs: From copies to the cache.
        handles: The arena's handle of each copy.
        rope: How keys are moved; None where they cannot be.

    Raises:
        RopeError: There are runs, and keys of this model cannot be moved.
        KernelError: A copy is not there.
    """
    if not runs:
        return _nothing
    if rope is None:
        raise RopeError("keys of this model cannot be moved to other positions")
    copies = list({run.copy: None for run in runs})
    numbers = arena.slots([handles[copy] for copy in copies]).tolist()
    records = dict(zip(copies, numbers, strict=True))
    slots = slot_map(runs, records.__getitem__, cache.layout.tokens)
    return lambda: ops.splice(arena.kv, cache, slots, rope)


def _nothing() -> None:
    pass
