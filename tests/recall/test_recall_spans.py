"""Spans are found at any alignment, in their own domain, and laid along a prompt without a gap."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from kvgraph.hooks.recall.cover import SpliceLimits, cover
from kvgraph.hooks.recall.spans import SpanIndex

SIZE = 16
ANY = 1 << 30


def anywhere(source: int, delta: int) -> bool:
    return True


OURS, THEIRS = ("ours",), ("theirs",)


def everything(block_hash: bytes) -> bool:
    return True


def new_index(most: int = 1000) -> SpanIndex:
    return SpanIndex(SIZE, most, np.random.default_rng(7))


def text(tokens: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 50_000, tokens)


def hashes(tokens: Any, name: str = "") -> list[bytes]:
    """A chain's hashes: each stands for all before it."""
    return [
        f"{name}{tuple(tokens[: end + SIZE])!r}".encode()
        for end in range(0, len(tokens) - SIZE + 1, SIZE)
    ]


def longest(
    index: SpanIndex,
    prompt: Any,
    at: int = 0,
    *,
    domain: tuple[str, ...] = OURS,
    reads: Callable[[bytes], bool] = everything,
    moves: Callable[[int, int], bool] = anywhere,
) -> Any:
    return index.longest([domain], prompt, at, reads, moves)


def added(index: SpanIndex, tokens: Any, domain: tuple[str, ...] = OURS) -> list[bytes]:
    chain = hashes(tokens, "/".join(domain))
    index.add(domain, chain, tokens)
    index.check_integrity()
    return chain


def reads(pieces: list[Any], chain: list[bytes], tokens: Any) -> Any:
    """What the segments of pieces say, read from their blocks."""
    parts = []
    for piece in pieces:
        for block_hash, first, count in piece.segments:
            start = chain.index(block_hash) * SIZE + first
            parts.append(tokens[start : start + count])
    return np.concatenate(parts)


@pytest.mark.parametrize("shift", range(SIZE))
def test_text_is_found_at_every_alignment(shift: int) -> None:
    index, source = new_index(), text(160, 1)
    chain = added(index, source)
    prompt = np.concatenate([text(shift, 2), source[37:121], text(20, 3)])
    piece = longest(index, prompt, shift)
    assert (piece.tokens, piece.delta) == (84, shift - 37)
    assert (reads([piece], chain, source) == source[37:121]).all()


def test_a_block_that_cannot_be_read_ends_a_span() -> None:
    index, source = new_index(), text(160, 1)
    chain = added(index, source)
    assert longest(index, source[16:], reads=lambda each: each != chain[5]).tokens == 4 * SIZE
    assert longest(index, source[16:], reads=lambda each: each != chain[1]) is None


def test_another_domains_text_is_not_found_behind_a_common_beginning() -> None:
    index, head, ours, theirs = new_index(), text(32, 1), text(64, 2), text(64, 3)
    for domain, tail in ((OURS, ours), (THEIRS, theirs)):
        tokens = np.concatenate([head, tail])
        index.add(domain, hashes(tokens), tokens)  # no salt: one head, under one hash
    prompt = np.concatenate([text(5, 9), head, theirs])
    assert longest(index, prompt, 5).tokens == 32
    assert longest(index, theirs) is None
    assert longest(index, prompt, 5, domain=("nobody",)) is None


def test_of_branches_the_one_that_goes_on_is_followed() -> None:
    index, head, one, other = new_index(), text(32, 1), text(64, 2), text(64, 3)
    added(index, np.concatenate([head, one]))
    added(index, np.concatenate([head, other]))
    for tail in (one, other):
        assert longest(index, np.concatenate([head, tail])).tokens == 96


def test_what_others_say_behind_a_common_beginning_hides_nothing() -> None:
    index, head, mine = new_index(), text(32, 1), text(120, 2)
    added(index, np.concatenate([head, mine]))
    for number in range(20):
        tokens = np.concatenate([head, text(64, 10 + number)])
        index.add(("other", str(number)), hashes(tokens), tokens)
    index.check_integrity()
    prompt = np.concatenate([head, mine])
    assert longest(index, prompt).tokens == len(prompt) // SIZE * SIZE


@pytest.mark.parametrize("shortest", [1, 15, 16, 24, 31, 32])
def test_a_piece_of_the_shortest_length_is_found_wherever_it_stood(shortest: int) -> None:
    source = text(200, 1)
    index = SpanIndex(SIZE, 100, np.random.default_rng(1), shortest)
    added(index, source)
    for first in range(40):
        prompt = np.concatenate([source[first : first + shortest], text(40, 2)])
        assert longest(index, prompt).tokens == shortest


def test_what_was_added_longest_ago_is_forgotten_first() -> None:
    index, first, second = new_index(most=8), text(96, 1), text(96, 2)
    added(index, first)
    added(index, second)
    assert len(index) == 8
    assert longest(index, second) is not None
    assert longest(index, first[:48]) is None


def test_tokens_that_lie_too_far_apart_are_not_moved() -> None:
    index, source = new_index(), text(160, 1)
    added(index, source)
    for most, is_found in ((99, False), (100, True)):
        piece = longest(index, source[100:], moves=SpliceLimits(most_distance=most).allow)
        assert (piece is not None) is is_found


@pytest.fixture
def two() -> tuple[SpanIndex, Any, Any]:
    """An index of two texts, and the texts."""
    index, one, other = new_index(), text(160, 1), text(160, 2)
    added(index, one)
    added(index, other)
    return index, one, other


def test_a_prompt_is_covered_piece_by_piece_up_to_its_first_gap(two: Any) -> None:
    index, one, other = two
    prompt = np.concatenate([one[3:80], other[50:120], text(10, 5), one[80:160]])
    pieces = cover(index, [OURS], prompt, 0, everything, SpliceLimits(32, ANY, 8, margin=0))
    found = [(piece.at, piece.tokens, piece.delta) for piece in pieces]
    assert found == [(0, 77, -3), (77, 70, 27)]


@pytest.mark.parametrize(
    ("limits", "covered"),
    [
        (SpliceLimits(32, ANY, 8, margin=8), [77, 62]),
        (SpliceLimits(32, ANY, 8, margin=39), [77]),
        (SpliceLimits(32, ANY, 1, margin=0), [77]),
        (SpliceLimits(71, ANY, 8, margin=0), [77]),
        (SpliceLimits(78, ANY, 8, margin=0), []),
    ],
)
def test_limits_bind(two: Any, limits: SpliceLimits, covered: list[int]) -> None:
    index, one, other = two
    prompt = np.concatenate([one[3:80], other[50:120]])
    pieces = cover(index, [OURS], prompt, 0, everything, limits)
    assert [piece.tokens for piece in pieces] == covered


def brute_force(sources: list[Any], prompt: Any, at: int) -> int:
    """The longest that any source says of the prompt from ``at`` on."""
    best = 0
    for source in sources:
        whole = source[: len(source) // SIZE * SIZE]
        for start in range(len(whole)):
            said = zip(whole[start:], prompt[at:], strict=False)
            best = max(best, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], said)))
    return best


@pytest.mark.parametrize("cut", [1, 7, 15, 16, 40])
def test_a_cut_inside_of_a_block_loses_nothing_of_what_stands_behind_it(cut: int) -> None:
    index, source = new_index(), text(320, 1)
    chain = added(index, source)
    prompt = np.concatenate([source[: 64 + cut], source[200:280], text(9, 2)])
    exact = (64 + cut) // SIZE * SIZE
    before = chain[exact // SIZE - 1]
    pieces = cover(index, [OURS], prompt, exact, everything, SpliceLimits(32, ANY, 8, 0), before)
    assert [piece.delta for piece in pieces] == [0, 64 + cut - 200][cut % SIZE == 0 :]
    assert np.array_equal(reads(pieces, chain, source), prompt[exact : 64 + cut + 80])
    # Alone it is not worth a load, and nobody else's text is taken.
    alone = np.concatenate([source[: 64 + cut], text(90, 3)])
    assert not cover(index, [OURS], alone, exact, everything, SpliceLimits(32, ANY), before)
    assert index.continued([THEIRS], before, prompt, exact, everything) is None


def test_whatever_is_as_long_as_two_windows_is_found() -> None:
    """Texts of few tokens, so that windows repeat; beside a search of all places."""
    rng = random.Random(11)
    make: Callable[[int], Any] = lambda count: np.array([rng.randrange(6) for _ in range(count)])  # noqa: E731
    for _ in range(60):
        index, sources = new_index(), [make(rng.randrange(16, 120)) for _ in range(3)]
        for source in sources:
            added(index, source)
        chosen = rng.choice(sources)
        start = rng.randrange(len(chosen))
        prompt = np.concatenate([make(rng.randrange(20)), chosen[start:], make(5)])
        at = len(prompt) - 5 - len(chosen[start:])
        most = brute_force(sources, prompt, at)
        piece = longest(index, prompt, at)
        if most >= 31:
            assert piece.tokens == most
        elif piece is not None:
            assert 16 <= piece.tokens <= most
