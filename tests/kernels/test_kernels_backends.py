"""Every back end against the torch reference, bit for bit, on random shapes, layouts and slot maps.

Memories are poisoned first, so that a byte that nobody addressed must keep its poison.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvgraph.kernels.backends import attention, emulation, native, reference
from kvgraph.kernels.errors import LayoutError
from kvgraph.kernels.gpu.calls import cell_layout
from kvgraph.kernels.layout.engines import cpu_layout
from kvgraph.kernels.layout.layout import GPU_LAYOUTS, KvLayout, PagedKv, gpu_layout, new_memory
from kvgraph.kernels.maths.rope import Pairing, Rope

F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
# Every pair is a compilation for the emulated GPU; these take each conversion once.
PAIRS = [(F32, F32), (F16, F16), (BF16, BF16), (INT8, INT8), (INT8, BF16), (BF16, INT8)]
RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def rotations(draw: st.DrawFn, head_dim: int) -> Rope:
    dims = 2 * draw(st.integers(1, head_dim // 2))
    start = draw(st.integers(0, head_dim - dims))
    inv_freq = 10_000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    return Rope(inv_freq, start, draw(st.sampled_from(Pairing)))


@st.composite
def gpu_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, Rope]:
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens, dims = draw(st.sampled_from([4, 16])), draw(st.sampled_from([16, 32, 64]))
    value_dims = draw(st.sampled_from([dims, dims, 0]))
    made = []
    for dtype in draw(st.sampled_from(PAIRS)):
        order, blocks = draw(st.sampled_from(GPU_LAYOUTS)), draw(st.integers(2, 5))
        made.append(gpu_layout(order, layers, blocks, heads, tokens, dims, value_dims, dtype))
    return made[0], made[1], draw(rotations(dims))


@st.composite
def cpu_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, Rope]:
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens, dims = draw(st.sampled_from([32, 64])), draw(st.sampled_from([32, 64]))
    isa, dtype = draw(st.sampled_from(["vec", "amx"])), draw(st.sampled_from([F32, F16, BF16]))
    cache = cpu_layout(isa, layers, draw(st.integers(2, 4)), heads, tokens, dims, dtype)
    record = cache.record if draw(st.booleans()) else cache.int8_record
    pair = [cache, record(draw(st.integers(2, 4)))]
    if draw(st.booleans()):
        pair.reverse()
    return pair[0], pair[1], draw(rotations(dims))


@st.composite
def slot_maps(draw: st.DrawFn, source: KvLayout, target: KvLayout) -> tuple[Any, Any, Any]:
    """Runs and scattered tokens, some skipped, with few or many different Δ."""
    count = draw(st.integers(0, min(source.slots, target.slots)))
    seed = draw(st.integers(0, 2**32 - 1))
    random = torch.Generator().manual_seed(seed)
    if draw(st.booleans()):
        old = torch.arange(count) + draw(st.integers(0, source.slots - count))
        new = torch.arange(count) + draw(st.integers(0, target.slots - count))
    else:
        old = torch.randint(0, source.slots, (count,), generator=random)
        new = torch.randperm(target.slots, generator=random)[:count]
    old = torch.where(torch.rand(count, generator=random) < 0.1, -1, old)
    choices = torch.randint(-9000, 9000, (draw(st.integers(1, 4)),), generator=random)
    choices[0] = 0
    delta = choices[torch.randint(0, len(choices), (count,), generator=random)]
    return old, new, delta


def poisoned(layout: KvLayout, seed: int) -> PagedKv:
    """Finite values everywhere a token stands; unaddressed elements cannot be told from them."""
    random = torch.Generator().manual_seed(seed)
    kv = new_memory(layout)
    if not layout.quantized:
        kv.memory.copy_(torch.randn(layout.elements, generator=random))
        kv.memory[: layout.elements // 3] *= 1e-5  # rows so small that an int8 scale has its floor
        return kv
    kv.memory.copy_(torch.randint(-127, 128, (layout.elements,), generator=random))
    slots, heads = torch.arange(layout.slots)[:, None], torch.arange(layout.heads)[None, :]
    for plane in (layout.key, layout.value):
        for layer in range(layout.layers if plane.scale is not None else 0):
            at = layout.scale_address(plane, layer, slots, heads) // 4
            kv.memory.view(torch.float32)[at] = torch.rand(at.shape, generator=random) + 0.01
    return kv


def bits(kv: PagedKv) -> Any:
    return kv.memory.view(torch.uint8)


def check_splice(backend: ModuleType, source: PagedKv, layout: KvLayout, how: Any) -> None:
    """The same bits everywhere in the target, the addressed ones and all others."""
    slots, others, delta, rope = how
    want, got = poisoned(layout, 1), poisoned(layout, 1)
    before = bits(source).clone()
    reference.splice(source, slots, want, others, delta, rope)
    backend.splice(source, slots, got, others, delta, rope)
    assert torch.equal(bits(want), bits(got))
    assert torch.equal(bits(source), before)
    unique = torch.unique(others)
    turned = torch.full_like(unique, 77)
    reference.rotate_in_place(want, unique, turned, rope)
    backend.rotate_in_place(got, unique, turned, rope)
    assert torch.equal(bits(want), bits(got))


@RELAXED
@given(st.data())
def test_native_moves_as_the_reference_does_in_cpu_layouts(data: st.DataObject) -> None:
    source, target, rope = data.draw(cpu_pairs())
    how = (*data.draw(slot_maps(source, target)), rope)
    check_splice(native, poisoned(source, 0), target, how)


@RELAXED
@given(st.data())
def test_native_moves_as_the_reference_does_in_gpu_layouts(data: st.DataObject) -> None:
    source, target, rope = data.draw(gpu_pairs())
    how = (*data.draw(slot_maps(source, target)), rope)
    check_splice(native, poisoned(source, 0), target, how)


@settings(RELAXED, max_examples=40)
@given(st.data())
def test_cuda_sources_move_as_the_reference_does(data: st.DataObject) -> None:
    source, target, rope = data.draw(gpu_pairs())
    how = (*data.draw(slot_maps(source, target)), rope)
    check_splice(emulation, poisoned(source, 0), target, how)


@pytest.mark.parametrize("backend", [native, emulation], ids=["native", "cuda"])
@RELAXED
@given(data=st.data())
def test_whole_blocks_there_and_back(backend: ModuleType, data: st.DataObject) -> None:
    layout = data.draw(gpu_pairs())[0] if data.draw(st.booleans()) else data.draw(cpu_pairs())[0]
    cache = new_memory(layout)
    arenas = [new_memory(layout.record(layout.blocks + 2)) for _ in range(2)]
    for kv in (cache, *arenas):  # any bits at all, the same poison in both arenas
        bits(kv).random_(0, 256, generator=torch.Generator().manual_seed(kv.memory.numel()))
    count = data.draw(st.integers(0, layout.blocks))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    blocks = torch.randperm(layout.blocks, generator=random)[:count]
    records = torch.randperm(layout.blocks + 2, generator=random)[:count]
    reference.spill(cache, blocks, arenas[0], records)
    backend.spill(cache, blocks, arenas[1], records)
    assert torch.equal(bits(arenas[0]), bits(arenas[1]))
    before = bits(cache).clone()
    slots = (blocks[:, None] * layout.tokens + torch.arange(layout.tokens)).reshape(-1)
    for layer in range(layout.layers):
        for plane in (layout.key, layout.value):
            cache.memory[reference._addresses(layout, plane, layer, slots)] = 0
    if layout.quantized:  # scales were not overwritten, and come back all the same
        backend.warm(arenas[1], records, cache, blocks)
    backend.warm(arenas[1], records, cache, blocks)
    assert torch.equal(bits(cache), before)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=str)
@pytest.mark.parametrize("backend", [attention, emulation], ids=["torch", "cuda"])
def test_attention_mass_is_that_of_a_dense_softmax(backend: ModuleType, dtype: Any) -> None:
    torch.manual_seed(3)
    layout = gpu_layout("LBNHC", 2, 9, 2, 16, 32, dtype=dtype)
    cache = poisoned(layout, 0)
    table = torch.tensor([[3, 1, 8, 0], [7, 2, 99, -1]])  # behind the end stands anything
    lengths, queries, scale = torch.tensor([50, 17]), torch.randn(2, 6, 32), 32**-0.5
    mass = backend.attention_mass(cache, 1, queries, table, lengths, scale)
    for sample, length in enumerate(lengths.tolist()):
        places = torch.arange(length)
        slots = table[sample][places // 16] * 16 + places % 16
        keys = reference.read_plane(cache, layout.key, 1, slots).repeat_interleave(3, dim=1)
        dense = torch.einsum("hd,thd->ht", queries[sample], keys) * scale
        want = torch.zeros(4).index_add(0, places // 16, dense.softmax(-1).mean(0))
        torch.testing.assert_close(mass[sample], want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mass.sum(1), torch.ones(2))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("backend", [attention, emulation], ids=["torch", "cuda"])
def test_confidence_against_fp64(backend: ModuleType, dtype: Any) -> None:
    logits = torch.randn(4, 1000, generator=torch.manual_seed(5)) * 4
    logits[1, 10:] = -torch.inf  # masked choices
    logits[2] = 0
    logits = logits.to(dtype)
    got = backend.confidence(logits)
    p = logits.double().softmax(-1)
    entropy = -torch.where(p > 0, p * p.log(), 0).sum(-1) / torch.tensor(1000.0).log()
    top = p.topk(2).values
    torch.testing.assert_close(got.entropy.double(), entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.top_mass.double(), top[:, 0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        got.margin.double(), (top[:, 0] / top[:, 1]).log(), rtol=1e-4, atol=1e-5
    )
    assert got.entropy[2] == pytest.approx(1)


def test_gpu_kernels_refuse_interleaved_tokens() -> None:
    with pytest.raises(LayoutError, match="interleave"):
        cell_layout(cpu_layout("vec", 1, 1, 1, 32, 32))
