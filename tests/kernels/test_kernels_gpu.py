"""The operations on a real GPU, the arena page-locked, against the torch reference on the host.

Skipped where there is no GPU; needs torch, numpy and cuda-core, and no engine (where the sidecar's
packages are missing too, run it with ``--noconftest``). Results must agree in every bit but for
sums over attention and logits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kvgraph.kernels import ops
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.backends import attention, reference
from kvgraph.kernels.errors import LayoutError
from kvgraph.kernels.gpu.method import COPY_ENGINE, COPY_METHODS, SPLICE_METHODS
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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROPE = Rope(10_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128))
LATENT = Rope(10_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64), 512, Pairing.GPTJ)
BLOCKS, TOKENS = 12, 16

every_order = pytest.mark.parametrize("order", GPU_LAYOUTS)


@pytest.fixture(params=["default stream", "own stream"], autouse=True)
def stream(request: Any) -> Iterator[None]:
    """Batched copies refuse the default stream, so both must be tried."""
    if request.param == "default stream":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


class Pair:
    """A cache on the GPU with its twin on the host, and a page-locked arena with its twin."""

    def __init__(self, layout: KvLayout, int8: bool = False) -> None:
        record = layout.int8_record(BLOCKS) if int8 else layout.record(BLOCKS)
        self.plain, self.plain_arena = new_memory(layout), new_memory(record)
        self.plain.memory.normal_()
        self.cache = PagedKv(self.plain.memory.cuda(), layout)
        self.owner = Arena(record)
        self.owner.allocate(BLOCKS)
        self.arena = self.owner.kv
        _bits(self.arena).copy_(_bits(self.plain_arena))

    def agree(self) -> bool:
        """Whether the GPU's side has every bit of the reference's."""
        torch.cuda.synchronize()
        return torch.equal(_bits(self.arena), _bits(self.plain_arena)) and torch.equal(
            _bits(self.cache).cpu(), _bits(self.plain)
        )

    def fill_arena(self) -> None:
        """All blocks, spilled by the reference on both sides."""
        slots = torch.arange(BLOCKS * TOKENS)
        still = torch.zeros_like(slots)
        reference.splice(self.plain, self.plain_arena, SlotMap(slots, slots, still), ROPE)
        _bits(self.arena).copy_(_bits(self.plain_arena))


def _bits(kv: PagedKv) -> Any:
    return kv.memory.view(torch.uint8)


def _slots(blocks: Any) -> Any:
    return (blocks[:, None] * TOKENS + torch.arange(TOKENS)).reshape(-1)


def _some(count: int = 7) -> Any:
    return torch.randperm(BLOCKS)[:count]


@every_order
def test_blocks_and_tokens_arrive_with_the_references_bits(order: str) -> None:
    pair = Pair(gpu_layout(order, 4, BLOCKS, 8, TOKENS, 128))
    blocks, records = _some(), _some()
    ops.spill(Blocks(pair.cache, blocks), Blocks(pair.arena, records))
    reference.spill(Blocks(pair.plain, blocks), Blocks(pair.plain_arena, records))
    assert pair.agree()
    elsewhere = _some()
    ops.load(Blocks(pair.arena, records), Blocks(pair.cache, elsewhere))
    reference.load(Blocks(pair.plain_arena, records), Blocks(pair.plain, elsewhere))
    assert pair.agree()

    old, new = _slots(records), torch.randperm(BLOCKS * TOKENS)[: 7 * TOKENS]
    old[3], new[5] = -1, -1
    delta = torch.randint(-3, 4, old.shape) * 1000
    ops.splice(pair.arena, pair.cache, SlotMap(old, new, delta), ROPE)
    reference.splice(pair.plain_arena, pair.plain, SlotMap(old, new, delta), ROPE)
    assert pair.agree()
    turned = new[new >= 0]
    ops.rotate_in_place(pair.cache, turned, torch.full_like(turned, -777), ROPE)
    reference.rotate_in_place(pair.plain, turned, torch.full_like(turned, -777), ROPE)
    assert pair.agree()


@every_order
@pytest.mark.parametrize("to_host", [True, False], ids=["spill", "warm"])
def test_every_method_copies_the_same_bytes(order: str, to_host: bool) -> None:
    from kvgraph.kernels.gpu.moves import copy_by

    for method in COPY_METHODS:
        pair = Pair(gpu_layout(order, 3, BLOCKS, 4, TOKENS, 64))
        pair.fill_arena()
        blocks, records = _some(), _some()
        if to_host:
            sides, plain = (pair.cache, pair.arena), (pair.plain, pair.plain_arena)
            numbers = blocks, records
        else:
            sides, plain = (pair.arena, pair.cache), (pair.plain_arena, pair.plain)
            numbers = records, blocks
        runs = block_runs(*map(Blocks, sides, numbers))
        copy_by(method, *sides, runs)
        reference.spill(Blocks(plain[0], numbers[0]), Blocks(plain[1], numbers[1]))
        assert pair.agree(), method


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_every_method_splices_the_same_bytes(int8: bool, monkeypatch: Any) -> None:
    from kvgraph.kernels.gpu import moves

    real = moves.chunks
    chunk = 3 * gpu_layout("BLHNC", 4, 1, 8, TOKENS, 128).block_bytes
    monkeypatch.setattr(moves, "chunks", partial(real, most=chunk, least=chunk // 3))
    for method in SPLICE_METHODS:
        pair = Pair(gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128), int8)
        pair.fill_arena()
        old = _slots(_some(11))[5:-3]
        new = torch.randperm(BLOCKS * TOKENS)[: len(old)]
        old[9], new[17] = -1, -1
        delta = torch.randint(-3, 4, old.shape) * 1000
        moves.splice_by(method, pair.arena, pair.cache, SlotMap(old, new, delta), ROPE)
        reference.splice(pair.plain_arena, pair.plain, SlotMap(old, new, delta), ROPE)
        assert pair.agree(), method


def test_every_method_spills_the_same_int8_bytes(monkeypatch: Any) -> None:
    from kvgraph.kernels.gpu import moves

    real = moves.chunks
    chunk = 3 * gpu_layout("BLHNC", 4, 1, 8, TOKENS, 128, dtype=torch.int8).block_bytes
    monkeypatch.setattr(moves, "chunks", partial(real, most=chunk, least=chunk // 3))
    for method in SPLICE_METHODS:
        pair = Pair(gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128), int8=True)
        pair.fill_arena()
        old, new = _slots(_some(11)), _slots(_some(11))
        still = SlotMap(old, new, torch.zeros_like(old))
        moves.splice_by(method, pair.cache, pair.arena, still, ROPE)
        reference.splice(pair.plain, pair.plain_arena, still, ROPE)
        assert pair.agree(), method


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_int8_copies_are_made_and_read_as_the_reference_does(dtype: Any) -> None:
    pair = Pair(gpu_layout("LBHNC", 2, BLOCKS, 4, TOKENS, 128, dtype=dtype), int8=True)
    here, there = _slots(_some()), _slots(_some())
    still = torch.zeros_like(here)
    ops.splice(pair.cache, pair.arena, SlotMap(here, there, still), ROPE)
    reference.splice(pair.plain, pair.plain_arena, SlotMap(here, there, still), ROPE)
    assert pair.agree()
    delta = torch.full_like(here, 4321)
    ops.splice(pair.arena, pair.cache, SlotMap(there, here, delta), ROPE)
    reference.splice(pair.plain_arena, pair.plain, SlotMap(there, here, delta), ROPE)
    assert pair.agree()


def test_the_part_of_a_latent_vector_that_has_positions_is_rotated() -> None:
    pair = Pair(gpu_layout("LBNHC", 3, BLOCKS, 1, TOKENS, 576, 0))
    pair.fill_arena()
    old, new = _slots(_some()), torch.randperm(BLOCKS * TOKENS)[: 7 * TOKENS]
    delta = torch.full_like(old, 99)
    ops.splice(pair.arena, pair.cache, SlotMap(old, new, delta), LATENT)
    reference.splice(pair.plain_arena, pair.plain, SlotMap(old, new, delta), LATENT)
    assert pair.agree()


def test_nothing_to_move_moves_nothing() -> None:
    pair = Pair(gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, 64))
    none = torch.empty(0, dtype=torch.int64)
    ops.spill(Blocks(pair.cache, none), Blocks(pair.arena, none))
    ops.load(Blocks(pair.arena, none), Blocks(pair.cache, none))
    ops.splice(pair.arena, pair.cache, SlotMap(none, none, none), ROPE)
    skipped = torch.full((4,), -1)
    ops.splice(pair.arena, pair.cache, SlotMap(skipped, skipped, skipped), ROPE)
    assert pair.agree()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_attention_mass_and_confidence_are_those_of_torch(dtype: Any) -> None:
    from kvgraph.kernels.backends import device

    layout = gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, 128, dtype=dtype)
    float_layout = gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, 128)
    source, plain = new_memory(float_layout), new_memory(layout)
    source.memory.normal_()
    slots = torch.arange(BLOCKS * TOKENS)
    reference.splice(source, plain, SlotMap(slots, slots, torch.zeros_like(slots)), ROPE)
    cache = PagedKv(plain.memory.cuda(), layout)
    table = torch.tensor([[3, 1, 8, 0], [7, 2, 99, -1]], dtype=torch.int32)
    lengths, queries = torch.tensor([50, 17], dtype=torch.int32), torch.randn(2, 6, 128)
    got = device.attention_mass(cache, 1, queries.cuda(), table.cuda(), lengths.cuda(), 128**-0.5)
    want = attention.attention_mass(plain, 1, queries, table.long(), lengths.long(), 128**-0.5)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-5)

    logits = torch.randn(5, 32_000)
    logits[1, 10:] = -torch.inf
    for got, want in zip(
        device.confidence(logits.cuda()), attention.confidence(logits), strict=True
    ):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-5)


def test_the_arena_is_page_locked_slab_by_slab_and_stays_so() -> None:
    layout = gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128)
    arena = Arena(layout.record(64), slab_bytes=4 * layout.block_bytes)
    handles = arena.allocate(64)
    assert arena.committed_bytes == 64 * arena.record_bytes
    pair, records = Pair(layout), torch.arange(BLOCKS) * 5 % 64
    want = new_memory(layout.record(64))
    ops.spill(Blocks(pair.cache, torch.arange(BLOCKS)), Blocks(arena.kv, records))
    torch.cuda.synchronize()
    reference.spill(Blocks(pair.plain, torch.arange(BLOCKS)), Blocks(want, records))
    for record in records.tolist():
        part = slice(record * layout.record(1).block_stride, None)
        size = layout.record(1).block_stride
        assert torch.equal(arena.kv.memory[part][:size], want.memory[part][:size])
    arena.free(handles)
    assert arena.committed_bytes == 64 * arena.record_bytes
    again = arena.allocate(1)
    ops.spill(
        Blocks(pair.cache, torch.tensor([3])),
        Blocks(arena.kv, torch.from_numpy(arena.slots(again))),
    )
    torch.cuda.synchronize()
    arena.close()


def test_memory_that_is_not_page_locked_is_refused_by_name() -> None:
    pair = Pair(gpu_layout("LBNHC", 2, BLOCKS, 2, TOKENS, 64))
    pageable = Arena(pair.arena.layout, pin=False)
    pageable.allocate(BLOCKS)
    one = torch.tensor([1])
    with pytest.raises(LayoutError, match="page-locked"):
        ops.spill(Blocks(pair.cache, one), Blocks(pageable.kv, one))
    with pytest.raises(LayoutError, match="page-locked"):
        ops.splice(pageable.kv, pair.cache, SlotMap(one, one, one), ROPE)
    assert pair.agree()


def test_a_thread_that_is_new_to_cuda_moves_beside_the_engine() -> None:
    pair = Pair(gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128))
    ops.prepare(pair.cache, pair.arena)
    transfer = TransferStream(pair.cache.memory.device)
    blocks, records = _some(), _some()
    pair.cache.memory.add_(1)  # what is moved must be what the engine has written before
    pair.plain.memory.add_(1)
    fence = mark(pair.cache.memory.device)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            transfer.run(
                fence, lambda: ops.spill(Blocks(pair.cache, blocks), Blocks(pair.arena, records))
            ).wait()
            old, delta = _slots(records), torch.full((7 * TOKENS,), 50)
            transfer.run(
                mark(pair.cache.memory.device),
                lambda: ops.splice(
                    pair.arena, pair.cache, SlotMap(old, _slots(blocks), delta), ROPE
                ),
            ).wait()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    reference.spill(Blocks(pair.plain, blocks), Blocks(pair.plain_arena, records))
    old, delta = _slots(records), torch.full((7 * TOKENS,), 50)
    reference.splice(pair.plain_arena, pair.plain, SlotMap(old, _slots(blocks), delta), ROPE)
    assert pair.agree()


def test_batches_of_copies_are_taken_by_this_driver() -> None:
    """Not a matter of correctness: without them each run costs a call."""
    from kvgraph.kernels.gpu.copy_engine import copy_engine
    from kvgraph.kernels.gpu.moves import copy_by

    pair = Pair(gpu_layout("LBNHC", 4, BLOCKS, 8, TOKENS, 128))
    blocks, records = _some(), _some()
    runs = block_runs(Blocks(pair.cache, blocks), Blocks(pair.arena, records))
    copy_by(COPY_ENGINE, pair.cache, pair.arena, runs)
    reference.spill(Blocks(pair.plain, blocks), Blocks(pair.plain_arena, records))
    assert pair.agree()
    if copy_engine().problem == "the driver has no cuMemcpyBatchAsync":
        pytest.skip("driver older than CUDA 12.8")
    assert copy_engine().problem is None
