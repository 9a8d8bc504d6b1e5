"""Copies and splices between memories of which a GPU's is one, and which way is fastest here.

Tables of the fastest way are measured once per process, device and kind of move: a fraction of a
second, which waits for the device. ``device.prepare`` does so ahead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from ..layout import Blocks, PagedKv, SlotMap, gpu_layout
from ..rope import Rope
from ..runs import ByteRuns, block_runs
from ..tensors import Tensor
from .calls import move_call, runs_call
from .copy_engine import copy_engine
from .launch import batch_stream, bound, run

# A way is a number of thread blocks, of a kernel that reads or writes host memory, or this.
COPY_ENGINE: Final = 0
GRIDS: Final = (16, 32, 64, 128)
# In the order of what they take from the engine's own compute.
COPY_WAYS: Final = (COPY_ENGINE, *GRIDS)
_SIZES: Final = tuple(1 << bits for bits in range(11, 22, 2))  # 2 KiB … 2 MiB
_COUNTS: Final = (1, 16, 256, 4096)
_LARGEST: Final = 64 << 20  # bytes that one measurement moves at most; chosen
COPY_CELLS: Final = tuple(
    (size, count) for size in _SIZES for count in _COUNTS if size * count <= _LARGEST
)
_SPLICE_CELLS: Final = tuple((1, _LARGEST >> shift) for shift in (8, 6, 4, 2, 0))  # (1, bytes)
_CLOSE: Final = 1.03  # a way that takes less from the engine may be this much slower; chosen
_ROUNDS: Final = 3  # of one measurement; chosen
_ROPE: Final = Rope(10_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128))


def device_of(*memories: PagedKv) -> torch.device:
    return next(kv.memory.device for kv in memories if kv.memory.is_cuda)


def copy_by(way: int, source: PagedKv, target: PagedKv, runs: ByteRuns) -> None:
    device = device_of(source, target)
    if way != COPY_ENGINE:
        run(runs_call(source, target, runs, way, str(device)))
        return
    with bound(device), batch_stream() as stream:
        copy_engine().copy(
            source.memory.data_ptr() + runs.sources,
            target.memory.data_ptr() + runs.targets,
            runs.size,
            stream,
        )


def splice_by(way: int, source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    run(move_call(source, target, slots, rope, grid=way, device=str(device_of(source, target))))


@dataclass(frozen=True)
class FastestWays:
    """The best way at each (run size in bytes, number of runs)."""

    winners: dict[tuple[int, int], int]

    def best(self, run_bytes: int, runs: int) -> int:
        """The best way at the nearest measured size and, for that size, the nearest count."""
        size = min({at[0] for at in self.winners}, key=lambda known: _apart(known, run_bytes))
        counts = [at[1] for at in self.winners if at[0] == size]
        return self.winners[size, min(counts, key=lambda known: _apart(known, runs))]


def measured(
    seconds: Callable[[int, int, int], float],
    ways: Iterable[int],
    cells: Iterable[tuple[int, int]],
) -> FastestWays:
    """Per cell, the first of ``ways`` that is about as fast as the fastest. ``seconds`` is what a
    way takes for (run size, count).
    """
    winners = {}
    for cell in cells:
        times = {way: seconds(way, *cell) for way in ways}
        enough = _CLOSE * min(times.values())
        winners[cell] = next(way for way, time in times.items() if time <= enough)
    return FastestWays(winners)


def _apart(known: int, value: int) -> float:
    return abs(math.log2(known / max(value, 1)))


@functools.cache
def copy_table(index: int, to_host: bool, /) -> FastestWays:
    """Return the ways to copy between pinned memory and GPU ``index``, one direction."""
    most = max(size * count for size, count in COPY_CELLS)
    memories = _memories(index, most, most)
    if to_host:
        memories.reverse()

    def seconds(way: int, size: int, count: int) -> float:
        layout = gpu_layout("BLHNC", 1, count, 1, 1, size // 4, 0, torch.float32)
        source, target = (
            PagedKv(memory[: count * size].view(torch.float32), layout) for memory in memories
        )
        order = _shuffled(count)
        runs = block_runs(Blocks(source, order), Blocks(target, order))
        return device_seconds(index, lambda: copy_by(way, source, target, runs))

    return measured(seconds, COPY_WAYS, COPY_CELLS)


@functools.cache
def splice_table(
    index: int, dtype: torch.dtype, target_dtype: torch.dtype, to_host: bool, /
) -> FastestWays:
    """Return the ways to splice between pinned memory and a GPU, by bytes on the host."""
    layouts = [gpu_layout("BLHNC", 4, 1, 8, 16, 128, dtype=of) for of in (dtype, target_dtype)]
    each = layouts[to_host].block_bytes
    most = max(size for _, size in _SPLICE_CELLS) // each
    sizes = [most * layout.block_bytes for layout in layouts]
    memories = _memories(index, *(reversed(sizes) if to_host else sizes))
    source, target = (
        PagedKv(memory.view(layout.dtype), layout.record(most))
        for memory, layout in zip(reversed(memories) if to_host else memories, layouts, strict=True)
    )

    def seconds(way: int, _: int, size: int) -> float:
        blocks = _shuffled(most)[: max(1, size // each)]
        slots = (blocks[:, None] * 16 + torch.arange(16)).reshape(-1)
        moved = SlotMap(slots, slots, torch.full_like(slots, 777))
        return device_seconds(index, lambda: splice_by(way, source, target, moved, _ROPE))

    return measured(seconds, GRIDS, _SPLICE_CELLS)


def device_seconds(index: int, action: Callable[[], None]) -> float:
    """Return the seconds of an action on an idle device: the best of ``_ROUNDS``."""
    times = []
    with torch.cuda.device(index):
        for _ in range(1 + _ROUNDS):  # the first warms up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.current_stream().synchronize()
            start.record()
            action()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3)
    return min(times[1:])


def _shuffled(count: int) -> Tensor:
    """A permutation, by a generator that leaves the engine's random state alone."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


def _memories(index: int, host_bytes: int, device_bytes: int) -> list[Tensor]:
    """Zeroed memory on the host and on the GPU, so that no scale and no rotation is NaN."""
    return [
        torch.zeros(host_bytes, dtype=torch.uint8, pin_memory=True),
        torch.zeros(device_bytes, dtype=torch.uint8, device=torch.device("cuda", index)),
    ]
