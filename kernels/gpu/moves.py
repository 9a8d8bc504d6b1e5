"""Copies and splices by each of the methods that ``measure`` compares. A staged splice passes
through the GPU's memory in two overlapping steps, copy engine and kernel; it is for machines whose
multiprocessors reach host memory more slowly than the copy engine does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch

from ..layout import Blocks, PagedKv, SlotMap
from ..rope import Rope
from ..runs import ByteRuns, block_runs
from ..tensors import Tensor
from .calls import DEFAULT_GRID, RESIDENT_GRID, move_call, runs_call
from .copy_engine import copy_engine
from .launch import batch_stream, bound, launcher, run, side_stream
from .method import COPY_ENGINE, Method

MOST_BYTES: Final = 16 << 20  # per chunk: long enough to hide the cost of queueing one; chosen
LEAST_BYTES: Final = 4 << 20  # per chunk: queueing one takes about as long as copying it; chosen
_DENSE: Final = 0.75  # if fewer of the tokens are wanted, whole records are wasteful; chosen


class Chunks(NamedTuple):
    records: Tensor  # int64 [n], each once, chunk after chunk
    starts: list[int]  # first record of each chunk; the last entry is the number of records
    order: Tensor  # int64 [T], token indices in the order of their chunks
    slots: Tensor  # int64 [T], in that order: slots in the chunk's buffer
    ends: list[int]  # number of tokens up to the end of each chunk

    def of(self, number: int) -> slice:
        return slice(self.starts[number], self.starts[number + 1])

    @property
    def places(self) -> Tensor:
        """int64 [n], the index of each record in its chunk's buffer."""
        starts = np.array(self.starts)
        first = np.repeat(starts[:-1], np.diff(starts))
        return torch.from_numpy(np.arange(len(first)) - first)

    @property
    def largest(self) -> int:
        return max(after - before for before, after in pairwise(self.starts))


def chunks(
    kv: PagedKv, slots: Tensor, falling: bool, most: int = MOST_BYTES, least: int = LEAST_BYTES
) -> Chunks:
    """Cut a splice from, or to, ``slots`` [T] of ``kv`` into chunks of ``least`` to ``most`` bytes.

    Args:
        slots: None of them negative.
        falling: Whether the last chunks are the small ones rather than the first. Nothing overlaps
            with the kernel at that end, so its chunk should be small.
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
        torch.from_numpy(records),
        starts.tolist(),
        torch.from_numpy(order),
        torch.from_numpy(staged[order]),
        np.cumsum(counts).tolist(),
    )


def graded(count: int, most: int, least: int) -> list[int]:
    """Return sizes that add up to ``count``: the largest allowed, then halves of the remainder."""
    sizes = []
    while count:
        sizes.append(min(count, max(least, min(most, -(-count // 2)))))
        count -= sizes[-1]
    return sizes


def worth_staging(far: PagedKv, parts: Chunks) -> bool:
    """Return whether most tokens of the touched records are wanted."""
    touched = len(parts.records) * far.layout.tokens
    return touched > 0 and len(parts.order) >= _DENSE * touched


def fills_records(far: PagedKv, parts: Chunks) -> bool:
    """Return whether the tokens are all those of the records that they touch, so that whole records
    can be written.
    """
    return 0 < len(parts.records) * far.layout.tokens == len(parts.order)


_BUFFERS: Final = 2


def device_of(*memories: PagedKv) -> torch.device:
    return next(kv.memory.device for kv in memories if kv.memory.is_cuda)


def copy_by(method: Method, source: PagedKv, target: PagedKv, runs: ByteRuns) -> None:
    device = device_of(source, target)
    if method != COPY_ENGINE:
        run(runs_call(source, target, runs, method.grid, str(device)))
        return
    with bound(device), batch_stream() as stream:
        copy_engine().copy(
            source.memory.data_ptr() + runs.sources,
            target.memory.data_ptr() + runs.targets,
            runs.size,
            stream,
        )


def splice_by(method: Method, source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    """Splice by a method of ``SPLICE_METHODS``; moves that cannot be staged are done directly."""
    # Staged are splices to a GPU of mostly wanted records, and splices from it of whole records.
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
    with bound(device) as index, _StagingBuffers(source, parts, device) as staging:
        for number in range(min(_BUFFERS, len(parts.ends))):
            staging.fetch(number)  # on their way while the kernels are prepared
        staged = SlotMap(parts.slots, slots.target[parts.order], slots.delta[parts.order])
        whole = move_call(
            staging.buffers[0], target, staged, rope, grid=RESIDENT_GRID, device=str(device)
        )
        launch, start = launcher(whole, index), 0
        for number, end in enumerate(parts.ends):
            staging.compute.wait_event(staging.copied[number])
            launch(whole.part(start, end - start, source=staging.buffer(number).memory))
            staging.used.append(staging.compute.record_event())
            if number + _BUFFERS < len(parts.ends):
                staging.fetch(number + _BUFFERS)
            start = end


def _spill_staged(
    source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope, parts: Chunks
) -> None:
    device = device_of(source)
    staged = SlotMap(slots.source[parts.order], parts.slots, slots.delta[parts.order])
    with bound(device) as index, _StagingBuffers(target, parts, device) as staging:
        whole = move_call(
            source, staging.buffers[0], staged, rope, grid=RESIDENT_GRID, device=str(device)
        )
        launch, start = launcher(whole, index), 0
        for number, end in enumerate(parts.ends):
            if number >= _BUFFERS:
                staging.compute.wait_event(staging.copied[number - _BUFFERS])
            launch(whole.part(start, end - start, target=staging.buffer(number).memory))
            staging.used.append(staging.compute.record_event())
            staging.send(number)
            start = end


class _StagingBuffers:
    """Two buffers on a GPU that the copy engine fills or empties in turns, ordered by events."""

    def __init__(self, far: PagedKv, parts: Chunks, device: torch.device) -> None:
        # Where every chunk's runs begin is found once: queueing a chunk must take less time than
        # copying it.
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
        # `compute`: the stream whose kernels read or write the buffers.
        self.compute, self.copies = torch.cuda.current_stream(device), side_stream(device.index)
        # The records may have been written just now, the buffers' memory may still be in use.
        self.copies.wait_stream(self.compute)
        self.copied: list[torch.cuda.Event] = []  # one per copied chunk
        self.used: list[torch.cuda.Event] = []  # one per chunk that a kernel has read or written

    def __enter__(self) -> _StagingBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        # Also after an error: later work may reuse the buffers, or read the records.
        self.compute.wait_stream(self.copies)

    def buffer(self, number: int) -> PagedKv:
        return self.buffers[number % _BUFFERS]

    def fetch(self, number: int) -> None:
        if number >= _BUFFERS:
            self.copies.wait_event(self.used[number - _BUFFERS])
        self._copy(number, True)

    def send(self, number: int) -> None:
        self.copies.wait_event(self.used[number])
        self._copy(number, False)

    def _copy(self, number: int, fetched: bool) -> None:
        of, buffer = self._parts.of(number), self.buffer(number).memory.data_ptr()
        ends = self._away[:, of].reshape(-1), self._here[:, of].reshape(-1) + buffer
        source, target = ends if fetched else ends[::-1]
        copy_engine().copy(source, target, self._run_bytes, self.copies.cuda_stream)
        self.copied.append(self.copies.record_event())
