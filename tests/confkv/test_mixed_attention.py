"""Attention in tiles over stored parts: equal to the dense one, int8 parts included."""

from __future__ import annotations

import shutil

import pytest
import torch
from kvgraph.kernels.backends import mixed
from kvgraph.kernels.backends.mixed import KvPart, mixed_attention, observed_mass
from kvgraph.kernels.quant import channel_scale, from_cells, rescaled, to_cells

BATCH, HEADS, KV_HEADS, DIMS = 2, 6, 2, 16


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole matrix at once, in double precision."""
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    logits = queries.double() @ keys.mT * DIMS**-0.5
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None], -torch.inf)
    weights = logits.softmax(-1)
    return (weights @ values).float(), weights.mean(1).float()


@pytest.mark.parametrize("tile", [1, 7, 64, 1000])
@pytest.mark.parametrize("count", [1, 5])
def test_tiles_give_what_the_dense_matrix_gives(tile: int, count: int) -> None:
    tokens = 100
    queries = drawn(BATCH, HEADS, count, DIMS, seed=1)
    keys, values = (drawn(BATCH, KV_HEADS, tokens, DIMS, seed=n) for n in (2, 3))
    visible = drawn(BATCH, count, tokens, seed=4) > 0
    parts = [KvPart(keys[:, :, :33], values[:, :, :33]), KvPart(keys[:, :, 33:], values[:, :, 33:])]
    for seen in (visible, None):
        found = mixed_attention(queries, parts, seen, DIMS**-0.5, tile)
        output, mass = dense(queries, keys, values, seen)
        torch.testing.assert_close(found.output, output)
        torch.testing.assert_close(found.mass, mass)
        torch.testing.assert_close(observed_mass(queries, keys, seen, DIMS**-0.5), mass)


def test_an_int8_part_is_read_as_its_floats() -> None:
    queries = drawn(BATCH, HEADS, 1, DIMS, seed=1)
    keys, values = (drawn(BATCH, KV_HEADS, 90, DIMS, seed=n) for n in (2, 3))
    scales = channel_scale(keys[:, :, :50]), channel_scale(values[:, :, :50])
    cells = [to_cells(x[:, :, :50], s) for x, s in zip((keys, values), scales, strict=True)]
    parts = [KvPart(*cells, *scales), KvPart(keys[:, :, 50:], values[:, :, 50:])]
    read = [
        torch.cat([from_cells(c, s), x[:, :, 50:]], 2)
        for c, s, x in zip(cells, scales, (keys, values), strict=True)
    ]
    found = mixed_attention(queries, parts, None, DIMS**-0.5, 16)
    output, mass = dense(queries, read[0], read[1], None)
    torch.testing.assert_close(found.output, output)
    torch.testing.assert_close(found.mass, mass)


def test_a_query_that_sees_nothing_reads_zeros() -> None:
    queries = drawn(1, HEADS, 2, DIMS, seed=1)
    keys = drawn(1, KV_HEADS, 20, DIMS, seed=2)
    visible = torch.zeros(1, 2, 20, dtype=torch.bool)
    visible[:, 1] = True
    found = mixed_attention(queries, [KvPart(keys, keys)], visible, 0.25, 8)
    assert not found.output[:, :, 0].any()
    assert not found.mass[:, 0].any()
    assert found.mass[:, 1].sum().item() == pytest.approx(1.0, abs=1e-5)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    values = drawn(BATCH, KV_HEADS, 200, DIMS, seed=5) * drawn(1, KV_HEADS, 1, DIMS, seed=6).exp()
    scale = channel_scale(values)
    error = (from_cells(to_cells(values, scale), scale) - values).abs()
    assert (error <= scale[:, :, None] * 0.5001).all()


def test_a_channel_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(1, 1, 4, 2)
    assert not from_cells(to_cells(zeros, channel_scale(zeros)), channel_scale(zeros)).any()


def test_a_scale_that_does_not_change_keeps_its_cells() -> None:
    values = drawn(1, KV_HEADS, 50, DIMS, seed=7)
    scale = channel_scale(values)
    wider = scale.clone()
    wider[:, 0] *= 1.7
    cells = to_cells(values, scale)
    anew = rescaled(cells, scale, wider)
    assert torch.equal(anew[:, 1], cells[:, 1])
    assert not torch.equal(anew[:, 0], cells[:, 0])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dims", [16, 40, 64])
def test_the_compiled_path_says_what_the_reference_says(dims: int, int8: bool) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    queries = drawn(BATCH, HEADS, 1, dims, seed=1)
    keys, values = (drawn(BATCH, KV_HEADS, 90, dims, seed=n) for n in (2, 3))
    scales = channel_scale(keys[:, :, :50]), channel_scale(values[:, :, :50])
    cells = [to_cells(x[:, :, :50], s) for x, s in zip((keys, values), scales, strict=True)]
    old = KvPart(*cells, *scales) if int8 else KvPart(keys[:, :, :50], values[:, :, :50])
    parts = [old, KvPart(keys[:, :, 50:], values[:, :, 50:])]
    visible = drawn(BATCH, 1, 90, seed=4) > 0
    visible[1] = False  # this row sees nothing
    assert mixed.serves(queries, parts)
    for seen in (visible, None):
        expected = mixed_attention(queries, parts, seen, dims**-0.5)
        for threads in (1, 2):
            found = mixed.native_mixed_attention(queries, parts, seen, dims**-0.5, threads)
            torch.testing.assert_close(found.output, expected.output)
            torch.testing.assert_close(found.mass, expected.mass)


def test_what_the_compiled_path_cannot_read_goes_to_torch() -> None:
    keys = drawn(1, KV_HEADS, 9, DIMS, seed=2)
    one, two = drawn(1, HEADS, 1, DIMS, seed=1), drawn(1, HEADS, 2, DIMS, seed=1)
    assert mixed.serves(one, [KvPart(keys, keys)])
    assert not mixed.serves(two, [KvPart(keys, keys)])
    assert not mixed.serves(one.half(), [KvPart(keys.half(), keys.half())])
    assert not mixed.serves(one, [KvPart(keys.mT.contiguous().mT, keys)])
