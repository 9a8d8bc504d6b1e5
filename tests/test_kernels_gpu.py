"""The same comparisons on a real GPU, the arena in pinned memory; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvgraph.kernels import ops, reference
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.layout import GPU_LAYOUTS, PagedKv, gpu_layout, new_memory
from kvgraph.kernels.rope import Rope

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROPE = Rope(10_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128))


@pytest.mark.parametrize("order", GPU_LAYOUTS)
def test_blocks_and_tokens_arrive_with_the_references_bits(order: str) -> None:
    layout = gpu_layout(order, 4, 12, 8, 16, 128)
    host = new_memory(layout)
    host.memory.normal_()
    cache = PagedKv(host.memory.cuda(), layout)
    arena, plain = Arena(layout.record(12)), new_memory(layout.record(12))
    blocks, records = torch.randperm(12)[:7], torch.randperm(12)[:7]
    arena.allocate(12)
    ops.spill(cache, blocks, arena.kv, records)
    torch.cuda.synchronize()
    reference.spill(host, blocks, plain, records)
    assert torch.equal(arena.kv.memory, plain.memory)
    ops.warm(arena.kv, records, cache, blocks)
    assert torch.equal(cache.memory.cpu(), host.memory)

    old, new = _slots(records, 16), torch.randperm(12 * 16)[: 7 * 16]
    delta = torch.full_like(old, 777)
    ops.splice(arena.kv, old, cache, new, delta, ROPE)
    reference.splice(plain, old, host, new, delta, ROPE)
    assert torch.equal(cache.memory.cpu(), host.memory)
    ops.rotate_in_place(cache, new, -delta, ROPE)
    reference.rotate_in_place(host, new, -delta, ROPE)
    assert torch.equal(cache.memory.cpu(), host.memory)


def _slots(blocks: Any, tokens: int) -> Any:
    return (blocks[:, None] * tokens + torch.arange(tokens)).reshape(-1)
