"""The host memory of spilled blocks: one address range of records, committed slab by slab.

Memory that a GPU must reach is page-locked all at once, ahead of time: the driver takes seconds for
it, during which an engine's launches would wait. Other memory is committed at first use.

A record is one block, all layers of it (``KvLayout.record``). A handle is a record's number and its
generation; freeing a record ends the generation, so that a stale handle is detected instead of
reading another block's bytes. Only one thread at a time may allocate and free.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import torch

from .errors import LayoutError, SlotError, TransferError
from .layout import KvLayout, PagedKv
from .tensors import Bools, Int64s, Integers

Handles: TypeAlias = Integers | Sequence[int]
SLAB_BYTES: Final = 64 << 20  # committed and returned at a time; chosen
# If the machine refuses to lock more, some must be left for the engine's own buffers. Chosen.
_LEFT_SLABS: Final = 4
_LEFT_SHARE: Final = 0.1
_SLOT_BITS: Final = 32
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1


class Arena:
    """Records of KV bytes within a memory budget."""

    def __init__(
        self, record: KvLayout, pin: bool | None = None, slab_bytes: int = SLAB_BYTES
    ) -> None:
        """Reserve the address range, and page-lock it slab by slab if it is pinned.

        Raises TransferError.

        Args:
            record: Layout of the records; its ``blocks`` is the capacity, unless the machine
                refuses to page-lock all of it.
            pin: Page-lock for DMA; by default, if CUDA is present.
            slab_bytes: Approximate bytes to commit, pin and release at a time.
        """
        self.capacity = record.blocks
        self.record_bytes = record.block_bytes
        self.per_slab = _records_per_slab(self.record_bytes, slab_bytes)
        slabs = -(-self.capacity // self.per_slab)
        # Private, because the pages of a shared map are not given back by MADV_DONTNEED.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, slabs * self.per_slab * self.record_bytes, flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._map, dtype=record.dtype)
        self._start = memory.data_ptr()
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._committed = np.zeros(slabs, dtype=bool)
        # Addresses that CUDA has page-locked. An arena that is forgotten must not leave them so:
        # other memory that comes to stand there would not be what CUDA believes.
        self._locked: set[int] = set()
        weakref.finalize(self, _unlock, self._locked)
        # Why there are fewer records than asked for.
        self.problem = self._lock_all() if self._pin else None
        layout = replace(record, blocks=self.capacity)
        # The records as a paged memory, in which a record's number is its block number.
        self.kv = PagedKv(memory[: layout.elements], layout)
        self._used = np.zeros(slabs * self.per_slab, dtype=bool)
        self._used[self.capacity :] = True  # what the last slab has beyond the budget
        self._generation = np.ones(self.capacity, dtype=np.int64)
        self._slab_records = np.zeros(slabs, dtype=np.int64)

    @classmethod
    def for_cache(
        cls, cache: KvLayout, budget_bytes: int, int8: bool = False, pin: bool | None = None
    ) -> Arena:
        """Create an arena for a cache's blocks, as many as the budget holds; raises LayoutError."""
        make = cache.int8_record if int8 else cache.record
        size = make(1).block_bytes
        if budget_bytes < size:
            raise LayoutError(f"a budget of {budget_bytes} bytes does not hold a block of {size}")
        return cls(make(budget_bytes // size), pin)

    @property
    def used(self) -> int:
        return int(self._slab_records.sum())

    @property
    def committed_bytes(self) -> int:
        return int(self._committed.sum()) * self.per_slab * self.record_bytes

    def can_allocate(self, count: int) -> bool:
        return count <= self.capacity - self.used

    def allocate(self, count: int) -> Int64s:
        """Allocate records of undefined content; returns int64 [count]. Raises SlotError."""
        if not self.can_allocate(count):
            raise SlotError(f"{count} records asked for, {self.capacity - self.used} are free")
        # Lowest first keeps records together, so that whole slabs fall free.
        slots = np.flatnonzero(~self._used)[:count]
        self._used[slots] = True
        self._count(slots, 1)
        self._committed[np.unique(slots // self.per_slab)] = True
        return (self._generation[slots] << _SLOT_BITS) | slots

    def free(self, handles: Handles) -> None:
        """Free records that no transfer uses any more. Slabs that become empty are returned to the
        machine, unless they are page-locked. Raises SlotError.
        """
        slots = self.slots(handles)
        if len(np.unique(slots)) != len(slots):
            raise SlotError("a record is to be freed twice")
        self._generation[slots] += 1
        self._take_back(slots)

    def valid(self, handles: Handles) -> Bools:
        """Return which handles still refer to the record that they were created for, bool [n]."""
        handles = np.asarray(handles, dtype=np.int64)
        slots = handles & _SLOT_MASK
        known = slots < self.capacity
        slots = np.where(known, slots, 0)
        current: Bools = self._generation[slots] == handles >> _SLOT_BITS
        return np.asarray(known & current & self._used[slots])

    def slots(self, handles: Handles) -> Int64s:
        """Return the record numbers of handles, int64 [n], for spill, load and splice; raises
        SlotError.
        """
        stale = len(handles) - int(self.valid(handles).sum())
        if stale:
            raise SlotError(f"{stale} of {len(handles)} records were freed meanwhile")
        return np.asarray(handles, dtype=np.int64) & _SLOT_MASK

    def record_view(self, handle: int) -> memoryview:
        start = int(self.slots([handle])[0]) * self.record_bytes
        return memoryview(self._map)[start : start + self.record_bytes]

    def close(self) -> None:
        self._release(np.flatnonzero(self._committed))

    def check_integrity(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        allocated = self._used.copy()
        allocated[self.capacity :] = False
        counted = allocated.reshape(-1, self.per_slab).sum(1)
        assert np.array_equal(counted, self._slab_records)
        assert not (self._slab_records[~self._committed]).any()

    def _take_back(self, slots: Integers) -> None:
        self._used[slots] = False
        self._count(slots, -1)
        if self._pin:  # the driver holds up the engine for this too
            return
        slabs = np.unique(slots // self.per_slab)
        self._release(slabs[self._committed[slabs] & (self._slab_records[slabs] == 0)])

    def _count(self, slots: Integers, change: int) -> None:
        np.add.at(self._slab_records, slots // self.per_slab, change)

    def _lock_all(self) -> str | None:
        """Page-lock slab after slab; if that ends early, shrink the arena and return why."""
        if hasattr(mmap, "MADV_DONTFORK"):
            # A child process would make the kernel move pages away from under the GPU.
            self._map.madvise(mmap.MADV_DONTFORK)
        for slab in range(len(self._committed)):
            address, size = self._slab_span(slab)
            try:
                _lock(address, size)
            except TransferError as error:
                self._leave_some(slab, error)
                return str(error)
            self._locked.add(address)
            self._committed[slab] = True
        return None

    def _leave_some(self, locked: int, error: TransferError) -> None:
        """Release some of the ``locked`` slabs, for the engine's own buffers to be locked too."""
        kept = locked - max(_LEFT_SLABS, round(locked * _LEFT_SHARE))
        self._release(np.arange(max(kept, 0), locked))
        if kept <= 0:
            raise error
        self.capacity = kept * self.per_slab

    def _release(self, slabs: Integers) -> None:
        for slab in slabs:
            address, size = self._slab_span(slab)
            if address in self._locked:
                self._locked.remove(address)
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
            self._map.madvise(mmap.MADV_DONTNEED, address - self._start, size)
            self._committed[slab] = False

    def _slab_span(self, slab: int) -> tuple[int, int]:
        size = self.per_slab * self.record_bytes
        return self._start + int(slab) * size, size


def _lock(address: int, size: int) -> None:
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    except RuntimeError as error:
        # The runtime reports an error once more, to whatever this thread launches next.
        with contextlib.suppress(Exception):
            torch.zeros(1, device="cuda").add_(1)
        raise TransferError(
            f"{size} bytes of host memory cannot be page-locked: {error}"
        ) from error


def _unlock(locked: set[int]) -> None:
    for address in locked:
        torch.cuda.cudart().cudaHostUnregister(address)
    locked.clear()


def _records_per_slab(record_bytes: int, slab_bytes: int) -> int:
    """How many records make about ``slab_bytes`` and whole pages, as madvise needs."""
    step = mmap.PAGESIZE // np.gcd(record_bytes, mmap.PAGESIZE)
    return int(max(1, slab_bytes // (record_bytes * step)) * step)
