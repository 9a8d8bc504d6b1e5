"""The same move by each of the methods that ``measure`` compares."""

from __future__ import annotations

from typing import Final

import torch

from ..layout.addressed import Blocks, SlotMap
from ..layout.block_runs import Runs, block_runs
from ..layout.layout import PagedKv
from ..maths.rope import Rope
from ..tensors import Tensor
from .calls import DEFAULT_GRID, RESIDENT_GRID, move_call, runs_call
from .copy_engine import copy_engine
from .launch import batch_stream, bound, run, side_stream
from .method import COPY_ENGINE, Method
from .staging import Chunks, chunks, fills_records, worth_staging

_BUFFERS: Final = 2


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
    """``reference.splice`` by a method of ``SPLICE_METHODS``; what cannot be staged goes directly.

    Staged are mostly wanted records on their way to a GPU, and whole ones on their way from it.
    """
    if method.name == "staged" and not slots.on_gpu:
        kept = slots.kept()
        if source.memory.is_cuda and fills_records(target, kept.target):
            _spill_staged(source, target, kept, rope)
            return
        if not source.memory.is_cuda and worth_staging(source, slots.source):
            _splice_staged(source, target, kept, rope)
            return
    grid, device = method.grid or DEFAULT_GRID, str(device_of(source, target))
    run(move_call(source, target, slots, rope, grid=grid, device=device))


def _splice_staged(source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    parts = chunks(source, slots.source, falling=True)
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
            compute.wait_event(belt.copied[number])
            run(whole.part(start, end - start, source=belt.buffer(number).memory))
            belt.used.append(compute.record_event())
            start = end
    finally:  # also after an error, before what follows is given the buffers' memory
        compute.wait_stream(belt.copies)


def _spill_staged(source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    parts = chunks(target, slots.target, falling=False)
    device = device_of(source)
    belt, compute = _Belt(target, parts, device), torch.cuda.current_stream(device)
    staged = SlotMap(slots.source[parts.order], parts.slots, slots.delta[parts.order])
    try:
        whole = move_call(
            source, belt.buffers[0], staged, rope, grid=RESIDENT_GRID, device=str(device)
        )
        start = 0
        for number, end in enumerate(parts.ends):
            if number >= _BUFFERS:
                compute.wait_event(belt.copied[number - _BUFFERS])
            run(whole.part(start, end - start, target=belt.buffer(number).memory))
            belt.used.append(compute.record_event())
            belt.send(number)
            start = end
    finally:  # as above; and who reads the records next does so on this stream
        compute.wait_stream(belt.copies)


class _Belt:
    """Two buffers on a GPU that the copy engine fills, or empties, in turns, ordered by events.

    Attributes:
        copied: One event per chunk that was copied.
        used: One event per chunk that a kernel has read, or written.
    """

    def __init__(self, far: PagedKv, parts: Chunks, device: torch.device) -> None:
        layout = far.layout.record(parts.largest)
        self._far, self._parts = far, parts
        self.buffers = [
            PagedKv(torch.empty(layout.elements, dtype=layout.dtype, device=device), layout)
            for _ in range(_BUFFERS)
        ]
        self.copies = side_stream(device.index)
        # The records may have been written just now, the buffers' memory may still be in use.
        self.copies.wait_stream(torch.cuda.current_stream(device))
        self.copied: list[torch.cuda.Event] = []
        self.used: list[torch.cuda.Event] = []

    def buffer(self, number: int) -> PagedKv:
        """Where a chunk stands."""
        return self.buffers[number % _BUFFERS]

    def fetch(self, number: int) -> None:
        """Queue a chunk's copy to its buffer; it begins when the one before in it is read."""
        if number >= _BUFFERS:
            self.copies.wait_event(self.used[number - _BUFFERS])
        self._copy(self._far, self._parts.of(number), self.buffer(number), True)

    def send(self, number: int) -> None:
        """Queue a chunk's copy from its buffer; it begins when the chunk is written."""
        self.copies.wait_event(self.used[number])
        self._copy(self._far, self._parts.of(number), self.buffer(number), False)

    def _copy(self, far: PagedKv, records: Tensor, buffer: PagedKv, fetched: bool) -> None:
        ends = Blocks(far, records), Blocks(buffer, torch.arange(len(records)))
        source, target = ends if fetched else ends[::-1]
        with torch.cuda.stream(self.copies):
            copy_by(COPY_ENGINE, source.kv, target.kv, block_runs(source, target))
        self.copied.append(self.copies.record_event())
