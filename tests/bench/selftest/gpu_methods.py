"""What only a GPU has: ways to copy, a side stream, memory that its kernels cannot reach."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import torch
from kvgraph.kernels import ops
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.backends import reference
from kvgraph.kernels.errors import LayoutError
from kvgraph.kernels.gpu.method import COPY_METHODS, SPLICE_METHODS, Method
from kvgraph.kernels.gpu.moves import copy_by, splice_by
from kvgraph.kernels.gpu.streams import TransferStream, mark
from kvgraph.kernels.layout import Blocks, SlotMap, gpu_layout
from kvgraph.kernels.rope import Rope
from kvgraph.kernels.runs import block_runs

from .kernel_checks import BLOCKS, TOKENS, Check, Pair, every_slot
from .kernel_places import Place

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
