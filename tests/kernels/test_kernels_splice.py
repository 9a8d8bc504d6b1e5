"""What moving keys by a rotation must keep: inverses, accuracy, a real Llama's K."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_streams import Cuda
from kvgraph.kernels.backends import reference
from kvgraph.kernels.gpu.streams import TransferStream, mark
from kvgraph.kernels.layout import KvLayout, PagedKv, SlotMap, gpu_layout, new_memory
from kvgraph.kernels.layout_engines import cpu_layout, from_views
from kvgraph.kernels.quant import dequantize, quantize
from kvgraph.kernels.rope import Pairing, Rope, rope_from_config
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

BLOCK = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PLAIN = {"rope_type": "default"}


def llama_config(rope: dict[str, Any], **sizes: int) -> LlamaConfig:
    shape = {
        "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 131072,
    } | sizes  # fmt: skip
    return LlamaConfig(rope_parameters={"rope_theta": 500000.0, **rope}, **shape)


def filled(layout: KvLayout, seed: int = 0) -> PagedKv:
    kv = new_memory(layout)
    kv.memory.copy_(torch.randn(layout.elements, generator=torch.Generator().manual_seed(seed)))
    return kv


def keys(kv: PagedKv, slots: Any, layer: int = 0) -> Any:
    return reference.read_plane(kv, kv.layout.key, layer, slots)


def values(kv: PagedKv, slots: Any, layer: int = 0) -> Any:
    return reference.read_plane(kv, kv.layout.value, layer, slots)


@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize(("start", "dims"), [(0, 64), (0, 32), (24, 16)])
def test_there_and_back_again(pairing: Pairing, start: int, dims: int) -> None:
    base = rope_from_config(llama_config(PLAIN, head_dim=dims))
    rope = Rope(base.inv_freq, start, pairing)
    cache = filled(cpu_layout("vec", 1, 4, 2, BLOCK, 64, torch.float32))
    slots = torch.randperm(4 * BLOCK)
    delta = torch.randint(-100_000, 100_000, slots.shape)
    before = cache.memory.clone()
    reference.splice(cache, cache, SlotMap(slots, slots, delta), rope)
    turned = keys(cache, slots)
    still = [d for d in range(64) if not start <= d < start + dims]
    original = keys(PagedKv(before, cache.layout), slots)
    assert torch.equal(turned[..., still], original[..., still])
    assert not torch.allclose(turned, original)
    reference.splice(cache, cache, SlotMap(slots, slots, -delta), rope)
    torch.testing.assert_close(cache.memory, before, rtol=0, atol=2e-6)


@pytest.mark.parametrize("settings", [PLAIN, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("delta", [1, 777, -4000, 100_000])
def test_bf16_error_against_fp64(settings: dict[str, Any], delta: int) -> None:
    """K kept in bf16, moved and rounded again; against K rotated in fp64 from the unrounded."""
    rope = rope_from_config(llama_config(settings, head_dim=128))
    exact = torch.randn(128, 2, 128, dtype=torch.float64, generator=torch.manual_seed(1))
    position = torch.arange(100_000, 100_128)
    layout = gpu_layout("LBHNC", 1, 4, 2, BLOCK, 128)
    source, target = new_memory(layout), new_memory(layout)
    slots = torch.arange(128)
    reference.write_plane(source, layout.key, 0, slots, rotated(rope, exact, position).float())
    moved = torch.full((128,), delta)
    reference.splice(source, target, SlotMap(slots, slots.flip(0), moved), rope)
    want = rotated(rope, exact, position + delta)
    error = (keys(target, slots.flip(0)).double() - want).norm() / want.norm()
    assert error <= 0.0031


def rotated(rope: Rope, key: Any, position: Any) -> Any:
    angle = position.double()[:, None] * rope.inv_freq[None, :]
    return rope.rotate(key, angle.cos(), angle.sin())


@pytest.mark.parametrize("settings", [PLAIN, YARN], ids=["default", "yarn"])
def test_layer_0_of_a_real_llama(settings: dict[str, Any]) -> None:
    """Layer 0's K depends on token and position only: moved K equals K computed there."""
    model = llama(settings)
    tokens = torch.randint(0, 96, (1, 96))
    at = {start: prefill(model, tokens, start) for start in (0, 1000)}
    layout = cpu_layout("vec", 2, 3, 2, BLOCK, 64, torch.float32)
    source, target = new_memory(layout), new_memory(layout)
    slots = torch.arange(96)
    key, value = at[0][0]
    reference.write_plane(source, layout.key, 0, slots, key[0].transpose(0, 1))
    reference.write_plane(source, layout.value, 0, slots, value[0].transpose(0, 1))
    rope = rope_from_config(model.config)
    reference.splice(source, target, SlotMap(slots, slots, torch.full((96,), 1000)), rope)
    moved_key, moved_value = at[1000][0]
    torch.testing.assert_close(
        keys(target, slots), moved_key[0].transpose(0, 1), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(values(target, slots), moved_value[0].transpose(0, 1))
    wrong = keys(source, slots) - moved_key[0].transpose(0, 1)
    assert wrong.abs().max() > 0.1


@pytest.mark.parametrize("settings", [PLAIN, YARN], ids=["default", "yarn"])
def test_a_shifted_cache_continues_with_the_same_distribution(settings: dict[str, Any]) -> None:
    model = llama(settings)
    rope = rope_from_config(model.config)
    tokens, shift = torch.randint(0, 96, (1, 64)), 513
    layers = prefill(model, tokens, 0)
    layout = gpu_layout("LBNHC", 2, 2, 2, BLOCK, 64, dtype=torch.float32)
    cache, slots = new_memory(layout), torch.arange(64)
    for layer, (key, value) in enumerate(layers):
        reference.write_plane(cache, layout.key, layer, slots, key[0].transpose(0, 1))
        reference.write_plane(cache, layout.value, layer, slots, value[0].transpose(0, 1))
    unmoved = next_token(model, cache, shift)
    reference.splice(cache, cache, SlotMap(slots, slots, torch.full((64,), shift)), rope)
    with torch.no_grad():
        stayed = model(torch.cat([tokens, torch.tensor([[7]])], dim=1)).logits[0, -1].softmax(-1)
    moved = next_token(model, cache, shift)
    torch.testing.assert_close(moved, stayed, rtol=1e-3, atol=1e-5)
    assert (unmoved - stayed).abs().max() > 1e-3


def llama(settings: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(settings, initializer_range=0.2))  # type: ignore[arg-type]
    return model.eval()


def prefill(model: LlamaForCausalLM, tokens: Any, start: int) -> list[tuple[Any, Any]]:
    """(K, V) of each layer, [1, heads, T, dims], with the first token at ``start``."""
    cache = DynamicCache()
    with torch.no_grad():
        positions = torch.arange(start, start + tokens.shape[1])[None]
        model(tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def next_token(model: LlamaForCausalLM, kv: PagedKv, shift: int) -> Any:
    """The distribution after one more token, its cache read from the paged memory."""
    cache, slots = DynamicCache(), torch.arange(64)
    for layer in range(2):
        cache.update(
            keys(kv, slots, layer).transpose(0, 1)[None],
            values(kv, slots, layer).transpose(0, 1)[None],
            layer,
        )
    with torch.no_grad():
        position = torch.tensor([[64 + shift]])
        out = model(torch.tensor([[7]]), position_ids=position, past_key_values=cache)
    return out.logits[0, -1].softmax(-1)


def test_int8_round_trip_stays_within_half_a_step() -> None:
    rows = torch.randn(500, 4, 128) * torch.logspace(-4, 4, 500)[:, None, None]
    cells, scale = quantize(rows)
    back = dequantize(cells, scale)
    assert ((back - rows).abs() <= 0.005 * rows.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(quantize(torch.zeros(1, 8))[0], torch.zeros(1, 8, dtype=torch.int8))


def test_int8_copies_are_rotated_when_they_come_back() -> None:
    layout = cpu_layout("vec", 2, 4, 2, BLOCK, 64)
    cache, target = filled(layout), filled(layout, 1)
    arena = new_memory(layout.int8_record(4))
    rope = rope_from_config(llama_config(PLAIN))
    slots = torch.randperm(4 * BLOCK)
    still = torch.zeros_like(slots)
    reference.splice(cache, arena, SlotMap(slots, slots, still), rope)
    reference.splice(arena, target, SlotMap(slots, slots, still + 55), rope)
    reference.splice(cache, cache, SlotMap(slots, slots, still + 55), rope)
    for plane in (keys, values):
        want, got = plane(cache, slots), plane(target, slots)
        assert (want - got).norm() / want.norm() < 0.01


def test_views_of_an_engines_cache_are_written_through() -> None:
    buffer = torch.zeros(2 * 4 * 2 * BLOCK * 128, dtype=torch.bfloat16)
    views = list(buffer.view(2, 4, 2, BLOCK, 128).unbind(0))
    kv = from_views(views, isa="vec")
    kv.memory.fill_(3)
    assert torch.equal(buffer, torch.full_like(buffer, 3))


CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_a_cpu_a_move_is_over_when_run_returns() -> None:
    transfer, moved = TransferStream(CPU), []
    for number in range(3):
        ticket = transfer.run(mark(CPU), lambda number=number: moved.append(number))
        assert ticket.done()
        ticket.wait()
    assert moved == [0, 1, 2]


def test_a_move_that_fails_says_so() -> None:
    transfer = TransferStream(CPU)

    def fail() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        transfer.run(mark(CPU), fail)
    assert transfer.run(mark(CPU), lambda: None).done()


GPU = torch.device("cuda", 1)


def test_whoever_waits_for_a_move_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the usual events a waiting thread asks again and again, with a core of its own."""
    cuda = Cuda(monkeypatch)
    ticket = TransferStream(GPU).run(mark(GPU), lambda: None)
    ticket.wait()
    assert cuda.said() == ["record", "wait", "record", "record", "sleep"]


def test_a_moves_time_begins_behind_its_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    fence = mark(GPU)
    ticket = TransferStream(GPU).run(fence, lambda: cuda.log.append(("move", None)))
    assert cuda.said() == ["record", "wait", "record", "move", "record"]
    assert cuda.log[0] == ("record", "engine")
    assert cuda.log[1] == ("wait", fence.event)
    assert ticket.seconds() == 1.5


def test_what_was_queued_before_an_error_is_awaited_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)

    def half() -> None:
        raise OSError("the rest does not come")

    with pytest.raises(OSError, match="the rest"):
        TransferStream(GPU).run(mark(GPU), half)
    assert cuda.said()[-2:] == ["record", "sleep"]
    assert "spin" not in cuda.said()


def test_a_stream_may_go_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *options: made.append(options))
    TransferStream(GPU)
    TransferStream(GPU, first=True)
    assert made == [(GPU, 0), (GPU, -1)], "a lower number goes first, and 0 is the ordinary one"


@needs_gpu
def test_a_move_waits_for_the_fence_and_for_nothing_later() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    transfer = TransferStream(device)
    source = torch.zeros(1 << 20, device=device)
    target = torch.zeros(1 << 20, pin_memory=True)
    torch.cuda._sleep(50_000_000)
    source.fill_(7)
    fence = mark(device)
    ticket = transfer.run(fence, lambda: target.copy_(source, non_blocking=True) and None)
    assert not ticket.done(), "queued behind tens of milliseconds of work, and did not wait for it"
    ticket.wait()
    assert ticket.done()
    assert bool((target == 7).all())

    torch.cuda._sleep(2_000_000_000)  # the engine computes on, for about a second
    source[:1].clone()
    later = transfer.run(fence, lambda: None)
    later.wait()
    assert not torch.cuda.current_stream().query(), "the move did not wait for the engine"
    torch.cuda.synchronize()


@needs_gpu
def test_what_failed_half_way_is_over_before_the_error_arrives() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    transfer = TransferStream(device)
    target = torch.zeros(1 << 24, pin_memory=True)
    source = torch.ones(1 << 24, device=device)

    def half() -> None:
        target.copy_(source, non_blocking=True)
        raise RuntimeError("the other half does not come")

    with pytest.raises(RuntimeError, match="other half"):
        transfer.run(mark(device), half)
    assert bool((target == 1).all())
