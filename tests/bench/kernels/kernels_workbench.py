"""The GPU, page-locked host memory, and every action of the matrix over the two."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from kvgraph.hooks.tiers.host import available_bytes
from kvgraph.kernels import ops
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.backends import reference
from kvgraph.kernels.errors import TransferError
from kvgraph.kernels.gpu.copy_engine import copy_engine
from kvgraph.kernels.gpu.moves import COPY_ENGINE, copy_by, copy_table, splice_table
from kvgraph.kernels.layout import Blocks, PagedKv, SlotMap, gpu_layout, new_memory
from kvgraph.kernels.rope import Pairing, Rope
from kvgraph.kernels.runs import block_runs
from torch.nn import functional

from .kernels_matrix import DELTA, LLAMA, Cell, Places, places, predicted_seconds, slots_of

ON_HOST: Final = "index_copy"
"""The action that does a part of its work on the host before the device can begin: it is timed from
an idle device."""


class Engine(Protocol):
    """What copies runs between addresses: the driver's batches, or a stand-in."""

    def copy(self, sources: Any, targets: Any, size: int, stream: int) -> None:
        """Queue copies of ``size`` bytes; see ``CopyEngine.copy``."""


Action = Callable[[], object]


def batched_copy(
    engine: Engine, source: PagedKv, records: Any, target: PagedKv, blocks: Any
) -> Action:
    """One driver call with a descriptor a page."""
    sources, targets = _addresses(source, records), _addresses(target, blocks)
    return lambda: engine.copy(sources, targets, source.layout.block_bytes, _stream())


def index_copy(source: PagedKv, records: Any, target: PagedKv, blocks: Any) -> Action:
    """torch alone: one gather into page-locked memory, one copy, one ``index_copy_``."""
    pages, cache, device = _pages(source), _pages(target), target.memory.device
    shape, dtype = (len(records), pages.shape[1]), source.memory.dtype
    gathered = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    here, there = torch.empty(shape, dtype=dtype, device=device), blocks.to(device)

    def copy() -> None:
        torch.index_select(pages, 0, records, out=gathered)
        here.copy_(gathered, non_blocking=True)
        cache.index_copy_(0, there, here)

    return copy


def copy_then_rotate(copy: Action, target: PagedKv, new: Any, delta: Any, rope: Rope) -> Action:
    """A batched copy to the final place, then our own splice in place: all passes memory twice."""

    def both() -> None:
        copy()
        ops.splice(target, target, SlotMap(new, new, delta), rope)

    return both


def three_passes(
    engine: Engine, source: PagedKv, records: Any, target: PagedKv, blocks: Any, delta: int,
    rope: Rope,
) -> Action:  # fmt: skip
    """Batched copy to a buffer, rotation of the buffer in torch, ``index_copy_`` to the pages."""
    count, device = len(records), target.memory.device
    layout = source.layout.record(count)
    buffer = PagedKv(torch.empty(layout.elements, dtype=layout.dtype, device=device), layout)
    copy = batched_copy(engine, source, records, buffer, torch.arange(count))
    cache, there = _pages(target), blocks.to(device)
    cos, sin = (each.to(device) for each in rope.rotation(torch.tensor([delta])))
    part = buffer.memory.view(-1, layout.cell)[:, rope.start : rope.start + rope.dims]
    if rope.pairing is Pairing.NEOX:
        first, second = part.chunk(2, dim=1)
    else:
        first, second = part[:, 0::2], part[:, 1::2]

    def passes() -> None:
        copy()
        a, b = first.float(), second.float()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)
        cache.index_copy_(0, there, _pages(buffer))

    return passes


def _pages(kv: PagedKv) -> Any:
    return kv.memory[: kv.layout.elements].view(kv.layout.blocks, -1)


def _addresses(kv: PagedKv, blocks: Any) -> Any:
    step = kv.layout.block_stride * kv.layout.itemsize
    return kv.memory.data_ptr() + blocks.numpy() * step


def _stream() -> int:
    """Batches refuse the default stream, whose handle is 0: measure on another."""
    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class StackShape:
    """Sizes of a Llama; the defaults are the 8B's."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336


_EPSILON: Final = 1e-5


class PrefillStack:
    """Layers with weights of their own in bf16: sdpa, gated MLP, no head; rotation is not timed."""

    def __init__(self, shape: StackShape, tokens: int, device: str) -> None:
        self._shape = shape
        kv = shape.kv_heads * shape.hidden // shape.heads
        rows = {
            "qkv": (shape.hidden + 2 * kv, shape.hidden), "out": (shape.hidden, shape.hidden),
            "up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }  # fmt: skip
        self._layers = [
            {name: _weight(*size, device) for name, size in rows.items()}
            for _ in range(shape.layers)
        ]
        half = shape.hidden // shape.heads // 2
        angle = torch.outer(torch.arange(tokens), 5e5 ** (-torch.arange(half) / half))
        self._cos = angle.cos().to(device, torch.bfloat16)
        self._sin = angle.sin().to(device, torch.bfloat16)

    def __call__(self, states: Any) -> Any:
        """Hidden states after all layers; bf16 [tokens, hidden]."""
        for weights in self._layers:
            states = states + self._attention(_norm(states), weights)
            states = states + _mlp(_norm(states), weights)
        return states

    def _attention(self, states: Any, weights: Any) -> Any:
        shape, tokens = self._shape, states.shape[0]
        dims = shape.hidden // shape.heads
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        parts = (states @ weights["qkv"].t()).view(tokens, -1, dims).split(sizes, dim=1)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        mixed = functional.scaled_dot_product_attention(
            self._turned(query), self._turned(key), value, is_causal=True, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(tokens, -1) @ weights["out"].t()

    def _turned(self, values: Any) -> Any:
        first, second = values.chunk(2, dim=-1)
        cos, sin = self._cos, self._sin
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mlp(states: Any, weights: Any) -> Any:
    gate, up = (states @ weights["up"].t()).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ weights["down"].t()


def _norm(states: Any) -> Any:
    return functional.rms_norm(states, states.shape[-1:], eps=_EPSILON)


def _weight(rows: int, columns: int, device: str) -> Any:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0, 0.02)


ROUNDS: Final = (3, 15)  # at least, at most
SECONDS: Final = 0.4  # that the rounds of one comparison may take together, about
# The device spins while work is queued, so that what is timed is the device alone. Beyond this
# long a queue (loops of thousands of launches) the host's time is part of the result.
_LONGEST_SPIN: Final = 0.05
_CYCLES: Final = 2.1e9  # a second, at least as fast as any clock


@dataclass
class Times:
    # from the first of its work to the last, on the device
    device_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)  # what queueing it took on the host


def time_in_turns(
    actions: dict[str, Action], rounds: tuple[int, int] = ROUNDS, seconds: float = SECONDS
) -> dict[str, Times | None]:
    """Samples of each action; None for one that did not fit the GPU's memory."""
    costs = {name: cost_of(action) for name, action in actions.items()}
    fitting = {name: cost for name, cost in costs.items() if cost is not None}
    whole = sum(both[0] for both in fitting.values())
    count = int(max(rounds[0], min(rounds[1], seconds / max(whole, 1e-6))))
    times: dict[str, Times | None] = {
        name: Times() if name in fitting else None for name in actions
    }
    for _ in range(count):
        for name, (_, queueing) in fitting.items():
            hidden = None if name == ON_HOST else queueing
            device, host = once(actions[name], hidden)
            taken = times[name]
            assert taken is not None
            taken.device_us.append(device * 1e6)
            taken.host_us.append(host * 1e6)
    return times


def once(action: Action, queueing: float | None = None) -> tuple[float, float]:
    """Seconds on the device and seconds of queueing."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if queueing is not None and queueing < _LONGEST_SPIN:
        torch.cuda._sleep(int((2 * queueing + 50e-6) * _CYCLES))
    start.record()
    began = time.perf_counter()
    action()
    queued = time.perf_counter() - began
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, queued


def cost_of(action: Action) -> tuple[float, float] | None:
    """Whole seconds and queueing, of the second time: the first compiles and measures."""
    cost: Any = None
    try:
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            queued = time.perf_counter() - began
            torch.cuda.synchronize()
            cost = time.perf_counter() - began, queued
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return cost  # type: ignore[no-any-return]


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
        cache, arena = self.memories(cell)
        rope, engine = cell.shape.rope(), copy_engine()
        copy = batched_copy(engine, arena, at.records, cache, at.blocks)
        made: dict[str, Action] = {
            ON_HOST: index_copy(arena, at.records, cache, at.blocks),
            "copy_then_rotate": copy_then_rotate(copy, cache, at.new, at.delta, rope),
            "three_passes": three_passes(engine, arena, at.records, cache, at.blocks, DELTA, rope),
        }
        if not engine.problem:
            made["batched_copy"] = copy
        return made

    def memories(self, cell: Cell) -> tuple[PagedKv, PagedKv]:
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
    """Half of what is free on the host, a third of the GPU's, in whole units."""
    free = min(LARGEST, available_bytes() // 2, torch.cuda.mem_get_info(device)[0] // 3)
    return int(free // _UNIT * _UNIT)


def _over(memory: Any, layout: Any) -> PagedKv:
    return PagedKv(memory[: layout.elements * layout.itemsize].view(layout.dtype), layout)


def _bytes(memory: Any) -> Any:
    return memory.view(torch.uint8)


def _winners(winners: dict[tuple[int, int], int]) -> dict[str, str]:
    return {
        f"{size}x{count}": "copy engine" if way == COPY_ENGINE else f"{way} thread blocks"
        for (size, count), way in winners.items()
    }
