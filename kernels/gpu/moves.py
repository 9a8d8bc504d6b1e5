"""The same move by each of the methods that ``measure`` compares."""

from __future__ import annotations

from typing import Final

import torch

from ..layout.addressed import Blocks, SlotMap
from ..layout.block_runs import Runs, block_runs
from ..layout.layout import PagedKv
from ..maths.rope import Rope
from .calls import DEFAULT_GRID, RESIDENT_GRID, move_call, runs_call
from .copy_engine import copy_engine
from .launch import batch_stream, bound, launcher, run, side_stream
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
        if source.memory.is_cuda:
            far, far_slots, fits, staged = target, kept.target, fills_records, _spill_staged
        else:
            far, far_slots, fits, staged = source, kept.source, worth_staging, _splice_staged
        parts = chunks(far, far_slots, falling=far is source)
        if fits(far, parts):
            staged(source, target, kept, rope, parts)
            return
    grid, device = method.grid or DEFAULT_GRID, str(device_of(source, target))
    run(move_call(source, target, slots, rope, grid=grid, device=device))


def _splice_staged(
    source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope, parts: Chunks
) -> None:
    device = device_of(target)
    with bound(device) as index, _Belt(source, parts, device) as belt:
        for number in range(min(_BUFFERS, len(parts.ends))):
            belt.fetch(number)  # on their way while the kernels are prepared
        staged = SlotMap(parts.slots, slots.target[parts.order], slots.delta[parts.order])
        whole = move_call(
            belt.buffers[0], target, staged, rope, grid=RESIDENT_GRID, device=str(device)
        )
        launch, start = launcher(whole, index), 0
        for number, end in enumerate(parts.ends):
            belt.compute.wait_event(belt.copied[number])
            launch(whole.part(start, end - start, source=belt.buffer(number).memory))
            belt.used.append(belt.compute.record_event())
            if number + _BUFFERS < len(parts.ends):
                belt.fetch(number + _BUFFERS)
            start = end


def _spill_staged(
    source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope, parts: Chunks
) -> None:
    device = device_of(source)
    staged = SlotMap(slots.source[parts.order], parts.slots, slots.delta[parts.order])
    with bound(device) as index, _Belt(target, parts, device) as belt:
        whole = move_call(
            source, belt.buffers[0], staged, rope, grid=RESIDENT_GRID, device=str(device)
        )
        launch, start = launcher(whole, index), 0
        for number, end in enumerate(parts.ends):
            if number >= _BUFFERS:
                belt.compute.wait_event(belt.copied[number - _BUFFERS])
            launch(whole.part(start, end - start, target=belt.buffer(number).memory))
            belt.used.append(belt.compute.record_event())
            belt.send(number)
            start = end


class _Belt:
    """Two buffers on a GPU that the copy engine fills, or empties, in turns, ordered by events.

    Where every chunk's runs begin is found once: queueing a chunk must take less than copying it.

    Attributes:
        compute: The stream whose kernels read or write the buffers.
        copied: One event per chunk that was copied.
        used: One event per chunk that a kernel has read, or written.
    """

    def __init__(self, far: PagedKv, parts: Chunks, device: torch.device) -> None:
        layout = far.layout.record(parts.largest)
        self._parts = parts
        self.buffers = [
            PagedKv(torch.empty(layout.elements, dtype=layout.dtype, device=device), layout)
            for _ in range(_BUFFERS)
        ]
        runs = block_runs(Blocks(far, parts.records), Blocks(self.buffers[0], parts.places))
        records = len(parts.records)
        self._away = runs.sources.reshape(-1, records) + far.memory.data_ptr()
        self._here, self._run_bytes = runs.targets.reshape(-1, records), runs.size
        self.compute, self.copies = torch.cuda.current_stream(device), side_stream(device.index)
        # The records may have been written just now, the buffers' memory may still be in use.
        self.copies.wait_stream(self.compute)
        self.copied: list[torch.cuda.Event] = []
        self.used: list[torch.cuda.Event] = []

    def __enter__(self) -> _Belt:
        return self

    def __exit__(self, *_: object) -> None:
        """Have what follows wait, also after an error: it may be given the buffers' memory, or read
        the records."""
        self.compute.wait_stream(self.copies)

    def buffer(self, number: int) -> PagedKv:
        """Where a chunk stands."""
        return self.buffers[number % _BUFFERS]

    def fetch(self, number: int) -> None:
        """Queue a chunk's copy to its buffer; it begins when the one before in it is read."""
        if number >= _BUFFERS:
            self.copies.wait_event(self.used[number - _BUFFERS])
        self._copy(number, True)

    def send(self, number: int) -> None:
        """Queue a chunk's copy from its buffer; it begins when the chunk is written."""
        self.copies.wait_event(self.used[number])
        self._copy(number, False)

    def _copy(self, number: int, fetched: bool) -> None:
        of, buffer = self._parts.of(number), self.buffer(number).memory.data_ptr()
        ends = self._away[:, of].reshape(-1), self._here[:, of].reshape(-1) + buffer
        source, target = ends if fetched else ends[::-1]
        copy_engine().copy(source, target, self._run_bytes, self.copies.cuda_stream)
        self.copied.append(self.copies.record_event())
