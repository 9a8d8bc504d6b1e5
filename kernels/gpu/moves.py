"""The same move by each of the methods that ``measure`` compares."""

from __future__ import annotations

import torch

from ..layout.addressed import Blocks, SlotMap
from ..layout.block_runs import Runs, block_runs
from ..layout.layout import PagedKv
from ..maths.rope import Rope
from .calls import DEFAULT_GRID, RESIDENT_GRID, move_call, runs_call
from .copy_engine import copy_engine
from .launch import batch_stream, bound, run, side_stream
from .method import COPY_ENGINE, Method
from .staging import Chunks, chunks, worth_staging


def device_of(*memories: PagedKv) -> torch.device:
    """The GPU of the first of the memories that is on one."""
    return next(kv.memory.device for kv in memories if kv.memory.is_cuda)


def copy_by(method: Method, source: PagedKv, target: PagedKv, runs: Runs) -> None:
    """Copy runs by a method of ``COPY_METHODS``."""
    device = device_of(source, target)
    if method != COPY_ENGINE:
        run(runs_call(source, target, runs, method.grid, str(device)))
        return
    with bound(device), batch_stream() as stream:
        copy_engine().copy(
            source.memory.data_ptr() + runs.sources, target.memory.data_ptr() + runs.targets,
            runs.size, stream,
        )  # fmt: skip


def splice_by(method: Method, source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    """``reference.splice`` by a method of ``SPLICE_METHODS``; all but dense slots go directly."""
    if method.name == "staged" and not slots.on_gpu and worth_staging(source, slots.source):
        _splice_staged(source, target, slots.kept(), rope)
        return
    grid, device = method.grid or DEFAULT_GRID, str(device_of(source, target))
    run(move_call(source, target, slots, rope, grid=grid, device=device))


def _splice_staged(source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    parts = chunks(source, slots.source)
    if not parts.ends:
        return
    device = device_of(target)
    belt, compute = _Belt(source, parts, device), torch.cuda.current_stream(device)
    try:
        belt.fetch(0)  # on its way while the kernels are prepared
        staged = SlotMap(parts.slots, slots.target[parts.order], slots.delta[parts.order])
        whole = move_call(
            belt.buffers[0], target, staged, rope, grid=RESIDENT_GRID, device=str(device)
        )
        start = 0
        for number, end in enumerate(parts.ends):
            if number + 1 < len(parts.ends):
                belt.fetch(number + 1)
            compute.wait_event(belt.arrived[number])
            run(whole.part(belt.buffers[number % 2].memory, start, end - start))
            belt.read.append(compute.record_event())
            start = end
    finally:  # also after an error, before what follows is given the buffers' memory
        compute.wait_stream(belt.copies)


class _Belt:
    """Two buffers on a GPU that the copy engine fills in turns, ordered by events.

    Attributes:
        arrived: One event per chunk that was fetched.
        read: One event per chunk that a kernel has read.
    """

    def __init__(self, source: PagedKv, parts: Chunks, device: torch.device) -> None:
        layout = source.layout.record(min(parts.per_chunk, len(parts.records)))
        self._source, self._parts = source, parts
        self.buffers = [
            PagedKv(torch.empty(layout.elements, dtype=layout.dtype, device=device), layout)
            for _ in range(2)
        ]
        self.copies = side_stream(device.index)
        # The records may have been written just now, the buffers' memory may still be in use.
        self.copies.wait_stream(torch.cuda.current_stream(device))
        self.arrived: list[torch.cuda.Event] = []
        self.read: list[torch.cuda.Event] = []

    def fetch(self, number: int) -> None:
        """Queue a chunk's copy; it begins when the chunk before the last is read."""
        parts, buffer = self._parts, self.buffers[number % 2]
        records = parts.records[number * parts.per_chunk :][: parts.per_chunk]
        if number >= 2:
            self.copies.wait_event(self.read[number - 2])
        with torch.cuda.stream(self.copies):
            here = torch.arange(len(records))
            runs = block_runs(Blocks(self._source, records), Blocks(buffer, here))
            copy_by(COPY_ENGINE, self._source, buffer, runs)
        self.arrived.append(self.copies.record_event())
