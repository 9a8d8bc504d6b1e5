"""What a sampled step measures of the cache: where a query looks, and what blocks say."""

from __future__ import annotations

import pytest
import torch
from kvgraph.hooks.vllm.sampled.measuring import (
    BlockEmbedder,
    LayerQuery,
    attended,
    confidence_scores,
)
from kvgraph.kernels import layout_engines
from kvgraph.kernels.backends.attention import confidence_score
from kvgraph.kernels.backends.base import block_meanings
from kvgraph.kernels.layout import PagedKv
from kvgraph.kernels.rope import Rope

LAYERS, BLOCKS, HEADS, TOKENS, DIMS = 2, 48, 2, 32, 32
ROPE = Rope(1e4 ** -(torch.arange(DIMS // 2, dtype=torch.float64) * 2 / DIMS))


def cache() -> PagedKv:
    torch.manual_seed(1)
    memory = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIMS)
    return layout_engines.from_views(
        [memory[n] for n in range(LAYERS)], isa="vec", mla=False, tokens=TOKENS
    )


def write(kv: PagedKv, block: int, keys: torch.Tensor) -> None:
    """Keys [heads, tokens, dims] of a block, in all layers, as the CPU backend stores them."""
    view = kv.memory.view(LAYERS, BLOCKS, HEADS, 2 * DIMS * TOKENS)
    view[:, block, :, : DIMS * TOKENS] = keys.transpose(1, 2).reshape(HEADS, -1)


def rotated(keys: torch.Tensor, place: int) -> torch.Tensor:
    positions = place * TOKENS + torch.arange(TOKENS)
    return ROPE.rotate(keys.transpose(0, 1), *ROPE.rotation(positions)).transpose(0, 1)


def test_equal_text_has_one_meaning_wherever_it_stands() -> None:
    kv, plain = cache(), torch.randn(HEADS, TOKENS, DIMS)
    write(kv, 3, rotated(plain, 0))
    write(kv, 40, rotated(plain, 9))
    blocks, places = torch.tensor([3, 40]), torch.tensor([0, 9])
    first, second = block_meanings(kv, 1, blocks, places, ROPE)
    assert torch.allclose(first, plain.mean(1).reshape(-1), atol=1e-4)
    assert torch.allclose(first, second, atol=1e-4)


def test_attention_is_averaged_over_layers_and_sums_to_one() -> None:
    kv, blocks = cache(), torch.tensor([5, 1, 30])
    looks = [LayerQuery(layer, torch.randn(4, DIMS), DIMS**-0.5) for layer in range(LAYERS)]
    mass = attended(kv, looks, blocks, 2 * TOKENS + 5)
    alone = [attended(kv, [look], blocks, 2 * TOKENS + 5) for look in looks]
    assert torch.allclose(mass, (alone[0] + alone[1]) / 2)
    assert abs(float(mass.sum()) - 1) < 1e-5


def told_of(
    meanings: BlockEmbedder, request: str, blocks: torch.Tensor, mass: torch.Tensor
) -> tuple[tuple[int, ...], torch.Tensor | None]:
    """What a step would tell that looks and reads back at once."""
    chosen = meanings.choose(request, blocks, mass)
    assert chosen is not None
    return meanings.report(request, *chosen)


def test_nothing_is_told_before_it_is_known_what_all_blocks_share() -> None:
    kv = cache()
    meanings = BlockEmbedder(kv, ROPE)
    blocks, mass = torch.arange(BLOCKS), torch.rand(BLOCKS)
    told = [told_of(meanings, f"r{turn}", blocks, mass) for turn in range(12)]
    assert [places for places, _ in told[:8]] == [()] * 8
    places, vectors = told[8]
    assert len(places) == 4
    assert vectors is not None
    assert vectors.shape == (4, HEADS * DIMS)
    assert mass[list(places)].min() >= mass.sort(descending=True).values[3]


def test_a_block_is_embedded_once_per_request() -> None:
    kv = cache()
    meanings = BlockEmbedder(kv, ROPE)
    blocks, mass = torch.arange(BLOCKS), torch.rand(BLOCKS)
    for turn in range(8):
        told_of(meanings, f"r{turn}", blocks, mass)
    first, _ = told_of(meanings, "mine", blocks, mass)
    second, _ = told_of(meanings, "mine", blocks, mass)
    assert not set(first) & set(second)


def test_a_request_whose_blocks_are_all_told_has_no_more_to_embed() -> None:
    kv = cache()
    meanings = BlockEmbedder(kv, ROPE)
    blocks, mass = torch.arange(BLOCKS), torch.rand(BLOCKS)
    for turn in range(8):
        told_of(meanings, f"r{turn}", blocks, mass)
    told: list[int] = []
    while (chosen := meanings.choose("mine", blocks[:6], mass[:6])) is not None:
        told += meanings.report("mine", *chosen)[0]
    assert sorted(told) == list(range(6))


def test_rows_of_logits_are_taken_in_the_order_that_is_asked_for() -> None:
    kv, logits = cache(), torch.randn(11, 9_000)
    alone = [float(confidence_score(row[None])[0]) for row in logits]
    sure = confidence_scores(kv, logits, [slice(7, 11), slice(0, 4)])
    assert sure.tolist() == pytest.approx([*alone[7:], *alone[:4]], abs=1e-6)
