"""Addresses of the layout descriptor against the engine's own writes and its own views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvgraph.kernels import layout as lay
from kvgraph.kernels import layout_engines
from kvgraph.kernels import runs as block_runs
from kvgraph.kernels.backends import reference
from kvgraph.kernels.backends.reference import read_plane
from kvgraph.kernels.errors import LayoutError
from kvgraph.kernels.layout import Blocks

LAYERS, BLOCKS, HEADS = 3, 5, 2


def arange_plane(layout: lay.KvLayout, plane: lay.Plane, layer: int, slots: Any) -> Any:
    """Addresses [T, H, D] of one plane."""
    return layout.address(
        plane,
        layer,
        slots[:, None, None],
        torch.arange(layout.heads)[None, :, None],
        torch.arange(plane.dims)[None, None, :],
    )


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim"),
    [
        ("vec", torch.float32, 64), ("vec", torch.bfloat16, 128), ("vec", torch.float16, 64),
        ("vec16", torch.float32, 80), ("vec16", torch.bfloat16, 112),
        ("amx", torch.bfloat16, 64), ("amx", torch.bfloat16, 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [32, 64])
def test_cpu_layouts_read_what_the_engines_own_op_wrote(
    vllm_loaded: None, isa: str, dtype: Any, head_dim: int, tokens: int
) -> None:
    from vllm import _custom_ops as ops

    slots = torch.randperm(BLOCKS * tokens)[: 2 * tokens + 3]
    key = torch.randn(len(slots), HEADS, head_dim).to(dtype)
    value = torch.randn(len(slots), HEADS, head_dim).to(dtype)
    cache = torch.zeros(BLOCKS, HEADS, 2 * tokens, head_dim, dtype=dtype)
    try:
        ops.cpu_attn_reshape_and_cache(key, value, *cache.chunk(2, dim=2), slots, isa)
    except RuntimeError as error:
        if isa == "amx" and "Unsupported CPU attention configuration" in str(error):
            pytest.skip("vLLM's build for CPUs without AVX-512 has no AMX path")
        raise

    layout = layout_engines.cpu_layout(isa, 1, BLOCKS, HEADS, tokens, head_dim, dtype)
    kv = lay.PagedKv(cache.view(-1), layout)
    assert torch.equal(read_plane(kv, layout.key, 0, slots).to(dtype), key)
    assert torch.equal(read_plane(kv, layout.value, 0, slots).to(dtype), value)
    assert int(cache.count_nonzero()) == int(key.count_nonzero() + value.count_nonzero())


@pytest.mark.parametrize("order", lay.GPU_LAYOUTS)
@pytest.mark.parametrize("kind", ["packed", "int8", "mla"])
def test_gpu_layouts_match_the_engines_views(vllm_loaded: None, order: str, kind: str) -> None:
    views, tokens = engine_views(order, kind)
    heads, head_dim, value_dim, dtype = KINDS[kind]
    layout = lay.gpu_layout(order, LAYERS, BLOCKS, heads, tokens, head_dim, value_dim, dtype)
    start = views[0].storage_offset()
    for layer, view in enumerate(views):
        assert view.dtype == dtype
        assert view.storage_offset() - start == layer * layout.layer_stride
        for extent, stride, mine in zip(
            view.shape,
            view.stride(),
            (layout.block_stride, layout.head_stride, layout.key.token_outer, 1),
            strict=True,
        ):
            assert extent == 1 or stride == mine
    described = layout_engines.from_views(views, mla=kind == "mla").layout
    assert (
        described.elements
        == layout.elements
        == views[0].untyped_storage().nbytes() // (layout.itemsize)
    )
    assert described.key.dims == head_dim
    assert described.value.dims == value_dim


KINDS = {
    "packed": (HEADS, 64, 64, torch.bfloat16),
    "int8": (HEADS, 128, 128, torch.int8),
    "mla": (1, 576, 0, torch.bfloat16),
}


def engine_views(
    order: str, kind: str, tokens: int = 16, part: int | None = None
) -> tuple[list[Any], int]:
    """vLLM's own views of a cache; ``part``: how many tokens attention takes at a time."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    heads, head_dim, value_dim, dtype = KINDS[kind]
    common = {"block_size": tokens, "num_kv_heads": heads, "head_size": head_dim, "dtype": dtype}
    if kind == "mla":
        spec: Any = interface.MLAAttentionSpec(**common)
    elif kind == "int8":
        spec = interface.FullAttentionSpec(
            **common, state_content_bytes=head_dim + value_dim + 2 * lay.SCALE_BYTES
        )
    else:
        spec = interface.FullAttentionSpec(**common)
    layout = KVCacheLayout[order]
    strides = interface.compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    size = spec.page_size_bytes * BLOCKS * LAYERS
    where = interface.KVCacheTensor(
        size=size,
        layers=[f"l{i}" for i in range(LAYERS)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    raw = torch.zeros(size, dtype=torch.int8)
    return interface.create_kv_cache_views(raw, spec, BLOCKS, layout, where, part), tokens


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("kind", ["packed", "int8", "mla"])
def test_blocks_that_attention_takes_in_parts_are_described_whole(
    vllm_loaded: None, order: str, kind: str
) -> None:
    """A scheduler's block 3 is rows 6 and 7 of a view in halves, and not row 3."""
    parts, _ = engine_views(order, kind, 32, 16)
    whole, _ = engine_views(order, kind, 32)
    assert parts[0].shape[0] == 2 * BLOCKS
    for number in range(BLOCKS):
        left = []
        for views, tokens in ((parts, 32), (whole, None)):
            kv = layout_engines.from_views(views, mla=kind == "mla", tokens=tokens)
            words = kv.memory.view(torch.int32)
            words.copy_(torch.arange(len(words)))
            record = lay.new_memory(kv.layout.record(1))
            reference.copy_blocks(
                Blocks(kv, torch.tensor([number])), Blocks(record, torch.tensor([0]))
            )
            left.append(set(record.memory.view(torch.int32).tolist()))
            assert kv.layout.block_bytes == record.memory.nbytes == 4 * len(left[-1])
        assert left[0] == left[1]
    assert layout_engines.from_views(whole, mla=kind == "mla", tokens=32).layout == (
        layout_engines.from_views(whole, mla=kind == "mla").layout
    )


def test_parts_that_do_not_adjoin_are_refused() -> None:
    views = list(torch.zeros(2, 6, 2, 16, 64).unbind(0))
    for wrong, tokens in ((views, 24), ([view[::2] for view in views], 32), (views, 8)):
        with pytest.raises(LayoutError, match="do not adjoin"):
            layout_engines.from_views(wrong, tokens=tokens)
    with pytest.raises(LayoutError, match="blocks of 32 tokens in a cache of 5 parts of 16"):
        layout_engines.from_views([view[:5] for view in views], tokens=32)


def layouts() -> list[lay.KvLayout]:
    sizes = (LAYERS, BLOCKS, HEADS)
    made = [lay.gpu_layout(order, *sizes, 16, 64) for order in lay.GPU_LAYOUTS]
    made += [lay.gpu_layout(order, *sizes, 16, 64, dtype=torch.int8) for order in lay.GPU_LAYOUTS]
    made += [lay.gpu_layout("BLNHC", LAYERS, BLOCKS, 1, 16, 576, 0)]
    made += [layout_engines.cpu_layout(isa, *sizes, 32, 64) for isa in layout_engines.CPU_ISAS]
    return made


@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: f"{layout.name}-{layout.dtype}")
def test_every_address_is_used_once_in_a_cache_and_in_its_record(layout: lay.KvLayout) -> None:
    for described in (layout, layout.record(7), layout.int8_record(4)):
        used = []
        slots = torch.arange(described.slots)
        for layer in range(described.layers):
            for plane in (described.key, described.value):
                if plane.dims == 0:
                    continue
                used.append(arange_plane(described, plane, layer, slots).reshape(-1))
                if plane.scale is not None:
                    heads = torch.arange(described.heads)[None, :]
                    first = described.scale_address(plane, layer, slots[:, None], heads)
                    used += [first.reshape(-1) + byte for byte in range(lay.SCALE_BYTES)]
        addresses = torch.cat(used)
        assert torch.equal(addresses.sort().values, torch.arange(described.elements))
        assert described.blocks * described.block_bytes == described.elements * described.itemsize


@pytest.mark.parametrize(
    ("order", "runs"),
    [("LBNHC", LAYERS), ("LBHNC", LAYERS), ("LHBNC", LAYERS * HEADS), ("BLHNC", 1), ("BLNHC", 1),
     ("BHLNC", 1)],
)  # fmt: skip
def test_blocks_go_to_their_records_in_the_longest_runs(order: str, runs: int) -> None:
    layout = lay.gpu_layout(order, LAYERS, BLOCKS, HEADS, 16, 64)
    plan = block_runs.copy_plan(layout, layout.record(9))
    assert plan.run * layout.itemsize * runs == layout.block_bytes
    assert torch.tensor([axis[0] for axis in plan.axes]).prod() == runs


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"NBLHC.*LBNHC"):
        lay.gpu_layout("NBLHC", 1, 1, 1, 16, 64)
    with pytest.raises(LayoutError, match=r"neon.*vec16"):
        layout_engines.cpu_layout("neon", 1, 1, 1, 32, 64)
    with pytest.raises(LayoutError, match="multiples of 32"):
        layout_engines.cpu_layout("amx", 1, 1, 1, 16, 64)
    with pytest.raises(LayoutError, match="float64"):
        lay.gpu_layout("LBNHC", 1, 1, 1, 16, 64, dtype=torch.float64)
    with pytest.raises(LayoutError, match="heads"):
        block_runs.copy_plan(
            lay.gpu_layout("LBNHC", 1, 4, 2, 16, 64), lay.gpu_layout("LBNHC", 1, 4, 4, 16, 64)
        )
    with pytest.raises(LayoutError, match="evenly spaced"):
        layout_engines.from_views([torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 16, 8)])
