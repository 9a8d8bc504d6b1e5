"""The GPU, page-locked host memory, and every action of the matrix over the two."""

from __future__ import annotations

from typing import Any, Final

import torch
from kvgraph.hooks.tiers.host import available_bytes
from kvgraph.kernels import ops
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.backends import reference
from kvgraph.kernels.errors import TransferError
from kvgraph.kernels.gpu.copy_engine import copy_engine
from kvgraph.kernels.gpu.measure import copy_table, splice_table
from kvgraph.kernels.gpu.method import COPY_ENGINE
from kvgraph.kernels.gpu.moves import copy_by
from kvgraph.kernels.layout import Blocks, PagedKv, SlotMap, gpu_layout, new_memory
from kvgraph.kernels.runs import block_runs

from .kernels_matrix import DELTA, LLAMA, Cell, Places, places, predicted_seconds, slots_of
from .kernels_peers import BatchedCopy, CopyThenRotate, IndexCopy, ThreePasses, VllmSwap, vllm_swap
from .kernels_prefill import PrefillStack, StackShape
from .kernels_timer import Action, Times, once, time_in_turns

LARGEST: Final = 18 << 30  # bytes of a side, of the largest cell
PEER_BYTES: Final = 1 << 30  # above it, peers would take most of the time and memory
CHECKED_BYTES: Final = 4 << 20  # cells up to here are compared with the reference
PREFILL_TOKENS: Final = 1280
_UNIT: Final = 2 << 20


class Workbench:
    """The two memories that all cells share, and what the bus between them can do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arena = _arena(affordable(device))
        self.host = self.arena.kv.memory.view(torch.uint8)
        self.gpu = torch.empty(len(self.host), dtype=torch.uint8, device=device)
        self.gpu.view(torch.bfloat16).normal_()
        self.launch = self._copy_seconds("to_device", 2048, 1)
        self.peaks = {way: self._peak(way) for way in ("to_device", "to_host")}

    def machine(self) -> dict[str, Any]:
        """What the cells were measured on."""
        index = self.device.index
        dtypes = torch.bfloat16, torch.int8
        return {
            "gpu": torch.cuda.get_device_name(index), "torch": torch.__version__,
            "host_bytes": len(self.host), "launch_us": self.launch * 1e6,
            "copy_engine_gb_per_s": {way: peak / 1e9 for way, peak in self.peaks.items()},
            "batched_copies": copy_engine().problem or "cuMemcpyBatchAsync",
            "copy_methods": {
                way: _winners(copy_table(index, way == "to_host").winners) for way in self.peaks
            },
            "splice_methods": {
                str(dtype): _winners(splice_table(index, dtype, torch.bfloat16, False).winners)
                for dtype in dtypes
            },
            "int8_spill_methods": _winners(
                splice_table(index, torch.bfloat16, torch.int8, True).winners
            ),
        }  # fmt: skip

    def row(self, cell: Cell) -> dict[str, Any]:
        """One cell, measured and where it is small compared with the reference."""
        row = cell.describe()
        if max(cell.cache(cell.pages + 1).elements * 2, cell.wire_bytes) > len(self.host):
            return {**row, "skipped": "memory"}
        if cell.cache_bytes <= CHECKED_BYTES and cell.pages == 16:
            row["equals_reference"] = self.equal(cell)
        times = time_in_turns(self.actions(cell))
        row["times"] = {name: self._figures(cell, name, taken) for name, taken in times.items()}
        return row

    def actions(self, cell: Cell) -> dict[str, Action]:
        """Our operations, and for whole bf16 pages their peers; the first fills the arena."""
        cache, arena = self.memories(cell)
        at, rope = places(cell), cell.shape.rope()
        blocks, records = Blocks(cache, at.blocks), Blocks(arena, at.records)
        moved = SlotMap(at.old, at.new, at.delta)
        splice: dict[str, Action] = {"splice": lambda: ops.splice(arena, cache, moved, rope)}
        if cell.int8:
            still = SlotMap(at.new, at.old, torch.zeros_like(at.delta))
            return {"spill": lambda: ops.splice(cache, arena, still, rope), **splice}
        if not cell.aligned:
            return splice
        return {
            "spill": lambda: ops.spill(blocks, records),
            "warm": lambda: ops.load(records, blocks),
            **splice,
            **(self.peers(cell, at) if cell.cache_bytes <= PEER_BYTES else {}),
        }

    def peers(self, cell: Cell, at: Places) -> dict[str, Action]:
        """The same work by other means."""
        cache, arena = self.memories(cell)
        rope, engine = cell.shape.rope(), copy_engine()
        copy = BatchedCopy(engine, arena, at.records, cache, at.blocks)
        made: dict[str, Action] = {
            "index_copy": IndexCopy(arena, at.records, cache, at.blocks),
            "copy_then_rotate": CopyThenRotate(copy, cache, at.new, at.delta, rope),
            "three_passes": ThreePasses(
                engine, arena, at.records, cache, at.blocks, DELTA, rope
            ),
        }  # fmt: skip
        if not engine.problem:
            made["batched_copy"] = copy
        if swap := vllm_swap(cache.layout.block_bytes):
            made["vllm_swap"] = VllmSwap(swap, arena, at.records, cache, at.blocks)
        return made

    def memories(self, cell: Cell) -> tuple[PagedKv, PagedKv]:
        """The cell's cache and arena, over the shared memories."""
        return _over(self.gpu, cell.cache(cell.pages + 1)), _over(self.host, cell.record())

    def equal(self, cell: Cell) -> bool:
        """Whether spill and splice leave the bytes that the torch reference leaves."""
        cache, arena = self.memories(cell)
        plain, record = new_memory(cache.layout), new_memory(arena.layout)
        plain.memory.normal_()
        cache.memory.copy_(plain.memory)
        at, rope = places(cell), cell.shape.rope()
        from_blocks = slots_of(at.blocks, cell.geometry()[2])
        still = torch.zeros_like(at.delta)
        splices: tuple[tuple[Any, PagedKv, PagedKv], ...] = (
            (reference.splice, plain, record), (ops.splice, cache, arena),
        )  # fmt: skip
        for splice, near, far in splices:
            splice(near, far, SlotMap(from_blocks, at.old, still), rope)
            splice(far, near, SlotMap(at.old, at.new, at.delta), rope)
        torch.cuda.synchronize()
        pairs = (arena.memory, record.memory), (cache.memory.cpu(), plain.memory)
        return all(torch.equal(_bytes(got), _bytes(want)) for got, want in pairs)

    def solo(self) -> tuple[int, list[float]]:
        """Bytes and seconds of a splice of 64 blocks of Llama-8B, each from an idle device."""
        cell = Cell(LLAMA, _UNIT, 64, int8=False, aligned=True)
        splice = self.actions(cell)["splice"]
        splice()
        return cell.wire_bytes, [once(splice)[0] for _ in range(15)]

    def prefill(self) -> dict[str, list[float]]:
        """Microseconds of splicing and of prefilling the same tokens; empty if it does not fit."""
        cell = Cell(LLAMA, _UNIT, PREFILL_TOKENS // 16, int8=False, aligned=False)
        shape = StackShape()
        try:
            stack = PrefillStack(shape, PREFILL_TOKENS, str(self.device))
        except torch.cuda.OutOfMemoryError:
            return {}
        size = PREFILL_TOKENS, shape.hidden
        states = torch.randn(size, dtype=torch.bfloat16, device=self.device)
        times = time_in_turns(
            {"splice": self.actions(cell)["splice"], "prefill": lambda: stack(states)}
        )
        return {name: taken.device_us for name, taken in times.items() if taken}

    def _figures(self, cell: Cell, name: str, times: Times | None) -> dict[str, Any]:
        if times is None:
            return {"skipped": "memory"}
        way = "to_host" if name == "spill" else "to_device"
        micros = sorted(times.device_us)
        middle = micros[len(micros) // 2]
        predicted = predicted_seconds(cell.wire_bytes, self.peaks[way], self.launch)
        figures = {
            "us": middle, "low_us": micros[0], "high_us": micros[-1],
            "host_us": sorted(times.host_us)[len(micros) // 2],
            "predicted_us": predicted * 1e6, "gb_per_s": cell.wire_bytes / middle / 1e3,
            "bf16_gb_per_s": cell.cache_bytes / middle / 1e3,
        }  # fmt: skip
        rounded = {key: float(f"{value:.5g}") for key, value in figures.items()}
        return {**rounded, "n": len(micros)}

    def _peak(self, way: str) -> float:
        """Bytes a second of sixteen runs of 16 MiB, or of as many as there is room for."""
        count = min(16, len(self.host) >> 24)
        return count * (16 << 20) / self._copy_seconds(way, 16 << 20, count)

    def _copy_seconds(self, way: str, size: int, count: int) -> float:
        layout = gpu_layout("BLHNC", 1, count, 1, 1, size // 4, 0, torch.float32)
        sides = [_over(self.host, layout), _over(self.gpu, layout)]
        source, target = sides if way == "to_device" else reversed(sides)
        every = torch.arange(count)
        runs = block_runs(Blocks(source, every), Blocks(target, every))
        times = time_in_turns({"copy": lambda: copy_by(COPY_ENGINE, source, target, runs)})["copy"]
        assert times is not None
        return sorted(times.device_us)[len(times.device_us) // 2] / 1e6


def _arena(size: int) -> Arena:
    """Page-locked in one piece, so that no run of any cell crosses a border; less if refused."""
    while True:
        blocks = size // _UNIT
        layout = gpu_layout("BLHNC", 1, blocks, 1, 1, _UNIT // 4, 0, torch.float32)
        try:
            arena = Arena(layout, pin=True, slab_bytes=size)
            arena.allocate(blocks)
        except (TransferError, OSError):
            if size < 256 << 20:
                raise
            size //= 2
        else:
            return arena


def affordable(device: torch.device) -> int:
    """Half of what is free on the host, by the machine and by its control group, and a third of
    what is on the GPU, in whole units."""
    free = min(LARGEST, available_bytes() // 2, torch.cuda.mem_get_info(device)[0] // 3)
    return int(free // _UNIT * _UNIT)


def _over(memory: Any, layout: Any) -> PagedKv:
    return PagedKv(memory[: layout.elements * layout.itemsize].view(layout.dtype), layout)


def _bytes(memory: Any) -> Any:
    return memory.view(torch.uint8)


def _winners(winners: dict[tuple[int, int], Any]) -> dict[str, str]:
    return {
        f"{size}x{count}": f"{method.name}/{method.grid}"
        for (size, count), method in winners.items()
    }
