"""Runs the CUDA kernels on a CPU, for tests: the same sources by g++, over a grid of coroutines.

It computes what a GPU would, barriers and asynchronous copies included, and refuses what a driver
or a GPU would refuse. Nothing here is fast.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

import torch
from kvgraph.kernels.backends.base import Confidence
from kvgraph.kernels.compilers import ARCHITECTURES, SOURCES, load_library
from kvgraph.kernels.errors import TransferError
from kvgraph.kernels.gpu.calls import (
    SHARED_LIMIT,
    THREADS,
    WARP,
    KernelCall,
    attention_mass_call,
    confidence_call,
    move_call,
    runs_call,
)
from kvgraph.kernels.layout import Blocks, PagedKv, SlotMap
from kvgraph.kernels.rope import Rope
from kvgraph.kernels.runs import block_runs
from kvgraph.kernels.tensors import Tensor

# From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_OPT_IN: Final = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}
_REGISTERS: Final = 65_536  # per multiprocessor, and so per thread block; from the same table
_REGISTER_UNIT: Final = 8  # a thread's registers are rounded up to it; from the same table
_MOST_BLOCKS: Final = (1 << 31) - 1  # thread blocks of a grid; from the same table


def check_launch(
    call: KernelCall, architecture: str, allowed_shared: int, registers: int = 0
) -> None:
    """Raise TransferError if such an architecture's driver would refuse to launch ``call``."""
    problem = (
        _grid_problem(call)
        or _shared_problem(call, architecture, allowed_shared)
        or _register_problem(call, registers)
    )
    if problem:
        raise TransferError(f"{call.kernel} on {architecture}: {problem}")


def _grid_problem(call: KernelCall) -> str | None:
    if not 1 <= call.grid <= _MOST_BLOCKS:
        return f"{call.grid} thread blocks; allowed: 1 to {_MOST_BLOCKS}"
    if not 1 <= call.threads <= THREADS or call.threads % WARP:
        return f"{call.threads} threads; allowed: whole warps, up to {THREADS} threads"
    return None


def _shared_problem(call: KernelCall, architecture: str, allowed: int) -> str | None:
    most = SHARED_OPT_IN[architecture]
    if allowed > most:
        return f"{allowed} bytes of shared memory asked for; allowed: {most}"
    if call.shared > max(allowed, SHARED_LIMIT):
        return f"{call.shared} bytes of shared memory, {max(allowed, SHARED_LIMIT)} were asked for"
    return None


def _register_problem(call: KernelCall, registers: int) -> str | None:
    rounded = -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT * call.threads
    return f"{rounded} registers; allowed: {_REGISTERS}" if rounded > _REGISTERS else None


GRID = 3  # thread blocks: few, but more than one; chosen
_FAULTS = {1: "an access to a misaligned address", 2: "an access beyond shared memory"}


def run(call: KernelCall) -> None:
    """Run a launch to its end, as ``launch.run``; TransferError where driver or GPU would fail."""
    for architecture in ARCHITECTURES:
        check_launch(call, architecture, call.shared_to_ask_for)
    args = (ctypes.c_void_p * len(call.args))(*(ctypes.addressof(value) for value in call.args))
    run_entry(call.kernel, call.defines, call.grid, call.threads, call.shared, args)


def run_entry(
    kernel: str,
    defines: tuple[str, ...],
    grid: int,
    threads: int,
    shared: int,
    args: ctypes.Array[ctypes.c_void_p] | int,
) -> None:
    """Run a kernel as a driver would; ``args`` are addresses of its arguments."""
    if fault := _entry(kernel, defines)(grid, threads, shared, args):
        raise TransferError(f"{kernel}: {_FAULTS[fault]}")


@functools.cache
def _entry(kernel: str, defines: tuple[str, ...]) -> Callable[..., int]:
    sources = [SOURCES / f"{kernel}.cu", SOURCES / "common.cuh", SOURCES / "host.hpp"]
    options = ["-x", "c++", "-O1", "-ffp-contract=off", "-DKVGRAPH_HOST", "-fsanitize=alignment"]
    options += [f"-D{define}" for define in defines]
    entry = load_library(f"emulated_{kernel}", sources, options)[f"launch_{kernel}"]
    entry.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
    entry.restype = ctypes.c_int
    return entry


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    """Do nothing: a kernel is compiled when it first runs."""


def copy_blocks(source: Blocks, target: Blocks) -> None:
    run(runs_call(source.kv, target.kv, block_runs(source, target), grid=GRID))


spill = load = copy_blocks  # as ``ops`` names it, which the GPU's checks call


def splice(source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
    run(move_call(source, target, slots, rope, grid=GRID))


def attention_mass(
    cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    call, mass = attention_mass_call(cache, layer, queries, block_table, lengths, scale)
    run(call)
    return mass.mean(1)


def confidence(logits: Tensor) -> Confidence:
    call, out = confidence_call(logits.contiguous())
    run(call)
    return Confidence(*torch.unbind(out, -1))
