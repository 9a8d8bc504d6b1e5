"""One suite for every back end: the reference's bits, on random shapes, layouts and slot maps.

A back end is tested by its name in ``BACKENDS`` or ``OBSERVERS``. Memories are poisoned first, so
that a byte that nobody addressed must keep its poison.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvgraph.kernels.backends import attention, device, native, reference
from kvgraph.kernels.backends.base import Backend, Observer
from kvgraph.kernels.errors import LayoutError
from kvgraph.kernels.layout import (
    GPU_LAYOUTS,
    Blocks,
    KvLayout,
    PagedKv,
    SlotMap,
    gpu_layout,
    new_memory,
)
from kvgraph.kernels.layout_engines import cpu_layout
from kvgraph.kernels.rope import Pairing, Rope
from kvgraph_bench.selftest import emulation

BACKENDS = {"reference": reference, "native": native, "device": device, "emulation": emulation}
OBSERVERS = {"attention": attention, "device": device, "emulation": emulation}

INTERLEAVED = ("reference", "native")  # they take apart what vLLM's CPU backend interleaves
F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
# Every pair is a compilation for the emulated GPU; these take each conversion once.
PAIRS = [(F32, F32), (F16, F16), (BF16, BF16), (INT8, INT8), (INT8, BF16), (BF16, INT8)]
RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def each(names: Any) -> Any:
    """A test for each name; what needs a GPU is skipped without one."""
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    marked = [pytest.param(name, marks=[no_gpu] * (name == "device")) for name in names]
    return pytest.mark.parametrize("name", marked)


every_backend = each(BACKENDS)
every_other = each([name for name in BACKENDS if name != "reference"])
every_observer = each(OBSERVERS)


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
    if layout.dtype != torch.int8:
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


def placed(name: str, kv: PagedKv) -> PagedKv:
    """The memory where the back end works; the same one, not a copy, if that is the host."""
    return PagedKv(kv.memory.cuda(), kv.layout) if name == "device" else kv


def bits(kv: PagedKv) -> Any:
    return kv.memory.view(torch.uint8).cpu()


def at(kv: PagedKv, slots: Any) -> list[Any]:
    """What stands in the slots, layer by layer, K and V, as integers: NaNs have their bits too."""
    whole = kv.memory.cpu().view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32}[kv.layout.itemsize]
    )
    return [
        whole[reference.addresses(kv.layout, plane, layer, slots)]
        for layer in range(kv.layout.layers)
        for plane in (kv.layout.key, kv.layout.value)
    ]


def filled_with_any_bits(layout: KvLayout, seed: int = 0) -> PagedKv:
    kv = new_memory(layout)
    random = torch.Generator().manual_seed(seed)
    kv.memory.view(torch.uint8).random_(0, 256, generator=random)
    return kv


@pytest.mark.parametrize(
    ("module", "contract"),
    [*((module, Backend) for module in BACKENDS.values()),
     *((module, Observer) for module in OBSERVERS.values())],
    ids=lambda value: getattr(value, "__name__", "").rpartition(".")[2],
)  # fmt: skip
def test_a_back_end_offers_what_its_contract_says(module: Any, contract: type) -> None:
    asked = [name for name in vars(contract) if not name.startswith("_")]
    assert asked
    for operation in asked:
        _, *said = inspect.signature(getattr(contract, operation)).parameters
        own = list(inspect.signature(getattr(module, operation)).parameters.values())
        assert [parameter.name for parameter in own][: len(said)] == said, operation
        more = own[len(said) :]
        assert all(parameter.default is not parameter.empty for parameter in more), operation


def check_splice(name: str, source: PagedKv, layout: KvLayout, how: Any) -> None:
    """The same bits everywhere in the target, the addressed ones and all others."""
    slots, others, delta, rope = how
    backend = BACKENDS[name]
    want, got = poisoned(layout, 1), placed(name, poisoned(layout, 1))
    before, there = bits(source).clone(), placed(name, source)
    reference.splice(source, want, SlotMap(slots, others, delta), rope)
    backend.splice(there, got, SlotMap(slots, others, delta), rope)
    assert torch.equal(bits(want), bits(got))
    assert torch.equal(bits(there), before)


@every_other
@RELAXED
@given(data=st.data())
def test_tokens_move_as_the_reference_moves_them(name: str, data: st.DataObject) -> None:
    source, target, rope = data.draw(gpu_pairs())
    how = (*data.draw(slot_maps(source, target)), rope)
    check_splice(name, poisoned(source, 0), target, how)


@every_other
@RELAXED
@given(data=st.data())
def test_interleaved_tokens_move_likewise_or_are_refused(name: str, data: st.DataObject) -> None:
    source, target, rope = data.draw(cpu_pairs())
    how = (*data.draw(slot_maps(source, target)), rope)
    if name in INTERLEAVED:
        check_splice(name, poisoned(source, 0), target, how)
    elif len(how[0]):
        with pytest.raises(LayoutError, match="interleave"):
            check_splice(name, poisoned(source, 0), target, how)


@pytest.mark.parametrize(
    "layout",
    [cpu_layout("vec", 2, 4, 2, 32, 64), cpu_layout("amx", 2, 4, 2, 32, 64)],
    ids=lambda layout: layout.name,
)
@each(INTERLEAVED)
def test_a_move_by_nothing_keeps_every_interleaved_bit(name: str, layout: KvLayout) -> None:
    check_move_by_nothing(name, layout)


@pytest.mark.parametrize("order", ["LBNHC", "BHLNC"])
@every_backend
def test_a_move_by_nothing_keeps_every_bit(name: str, order: str) -> None:
    check_move_by_nothing(name, gpu_layout(order, 2, 4, 2, 32, 64))


def check_move_by_nothing(name: str, layout: KvLayout) -> None:
    """NaNs among them."""
    source = placed(name, filled_with_any_bits(layout))
    target = placed(name, filled_with_any_bits(layout, 1))
    random = torch.Generator().manual_seed(7)
    slots, elsewhere = (torch.randperm(layout.slots, generator=random)[:96] for _ in range(2))
    rope = Rope(10_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    still = torch.zeros_like(slots)
    BACKENDS[name].splice(source, target, SlotMap(slots, elsewhere, still), rope)
    for old, new in zip(at(source, slots), at(target, elsewhere), strict=True):
        assert torch.equal(old, new)


@every_backend
def test_padding_slots_are_skipped(name: str) -> None:
    layout = gpu_layout("LBNHC", 1, 2, 2, 32, 64)
    source, target = placed(name, poisoned(layout, 0)), placed(name, poisoned(layout, 1))
    before = bits(target).clone()
    rope = Rope(10_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    skipped = torch.tensor([-1, 3]), torch.tensor([2, -1]), torch.tensor([9, 9])
    BACKENDS[name].splice(source, target, SlotMap(*skipped), rope)
    assert torch.equal(bits(target), before)


@every_backend
@RELAXED
@given(data=st.data())
def test_whole_blocks_there_and_back(name: str, data: st.DataObject) -> None:
    layout = data.draw(gpu_pairs())[0] if data.draw(st.booleans()) else data.draw(cpu_pairs())[0]
    backend, record = BACKENDS[name], layout.record(layout.blocks + 2)
    plain, want = filled_with_any_bits(layout), filled_with_any_bits(record, 1)
    cache, arena = placed(name, plain), placed(name, filled_with_any_bits(record, 1))
    before = bits(cache).clone()
    count = data.draw(st.integers(0, layout.blocks))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    blocks = torch.randperm(layout.blocks, generator=random)[:count]
    records = torch.randperm(layout.blocks + 2, generator=random)[:count]
    reference.copy_blocks(Blocks(plain, blocks), Blocks(want, records))
    backend.copy_blocks(Blocks(cache, blocks), Blocks(arena, records))
    assert torch.equal(bits(arena), bits(want))
    slots = (blocks[:, None] * layout.tokens + torch.arange(layout.tokens)).reshape(-1)
    for layer in range(layout.layers):  # scales are not overwritten, and come back all the same
        for plane in (layout.key, layout.value):
            cache.memory[reference.addresses(layout, plane, layer, slots)] = 0
    backend.copy_blocks(Blocks(arena, records), Blocks(cache, blocks))
    assert torch.equal(bits(cache), before)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=str)
@every_observer
def test_attention_mass_is_that_of_a_dense_softmax(name: str, dtype: Any) -> None:
    torch.manual_seed(3)
    layout = gpu_layout("LBNHC", 2, 9, 2, 16, 32, dtype=dtype)
    cache = poisoned(layout, 0)
    table = torch.tensor([[3, 1, 8, 0], [7, 2, 99, -1]])  # behind the end stands anything
    lengths, queries, scale = torch.tensor([50, 17]), torch.randn(2, 6, 32), 32**-0.5
    observer = OBSERVERS[name]
    mass = observer.attention_mass(placed(name, cache), 1, queries, table, lengths, scale).cpu()
    for sample, length in enumerate(lengths.tolist()):
        places = torch.arange(length)
        slots = table[sample][places // 16] * 16 + places % 16
        keys = reference.read_plane(cache, layout.key, 1, slots).repeat_interleave(3, dim=1)
        dense = torch.einsum("hd,thd->ht", queries[sample], keys) * scale
        want = torch.zeros(4).index_add(0, places // 16, dense.softmax(-1).mean(0))
        torch.testing.assert_close(mass[sample], want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mass.sum(1), torch.ones(2))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@every_observer
def test_confidence_against_fp64(name: str, dtype: Any) -> None:
    logits = torch.randn(4, 1000, generator=torch.manual_seed(5)) * 4
    logits[1, 10:] = -torch.inf  # masked choices
    logits[2] = 0
    logits = logits.to(dtype)
    there = logits.cuda() if name == "device" else logits
    got = [part.cpu().double() for part in OBSERVERS[name].confidence(there)]
    p = logits.double().softmax(-1)
    entropy = -torch.where(p > 0, p * p.log(), 0).sum(-1) / torch.tensor(1000.0).log()
    top = p.topk(2).values
    margin = (top[:, 0] / top[:, 1]).log()
    torch.testing.assert_close(got[0], entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], margin, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[2], top[:, 0], rtol=1e-4, atol=1e-6)
    assert got[0][2] == pytest.approx(1)
