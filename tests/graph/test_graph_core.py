"""The compiled loops beside plain Python, and what they say of arrays that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import kvgraph._graph as core
import numpy as np
import pytest
from kvgraph.graph.tables.blocks import DEPTH_TIE, keep_chains_whole, places_of
from kvgraph.graph.tables.hash_index import HashIndex

ROWS, KEYS = np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.uint64)


def forest(rng: np.random.Generator, size: int) -> tuple[list[int], list[int]]:
    """Places, parents before their children, and each one's parent; ``size`` for none."""
    order = rng.permutation(size).tolist()
    above = [size] * (size + 1)
    for at in range(1, size):
        if rng.random() < 0.7:
            above[order[at]] = order[int(rng.integers(at))]
    return order, above


@pytest.mark.parametrize("size", [0, 1, 2, 50])
def test_no_block_goes_before_those_behind_it_in_whatever_order_they_stand(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(50):
        order, above = forest(rng, size)
        scores, lengths = rng.normal(size=size), rng.integers(1, 5, size)
        wanted, of_runs = scores.copy(), scores.copy()
        for at in reversed(order):
            if (up := above[at]) < size:
                wanted[up] = min(wanted[up], wanted[at] - DEPTH_TIE)
                of_runs[up] = min(of_runs[up], of_runs[at] - lengths[up] * DEPTH_TIE)
        places = np.array(above, dtype=np.int64)
        assert np.array_equal(keep_chains_whole(scores, places), wanted)
        assert np.array_equal(keep_chains_whole(scores, places, lengths), of_runs)


def test_the_highest_are_found_and_of_equals_the_first() -> None:
    rng = np.random.default_rng(2)
    for size in (0, 1, 9, 400, 30_000):
        for limit in (0, 1, size // 3, size):
            scores, among = np.round(rng.normal(size=size), 1), rng.random(size) < 0.8
            scores[: size // 5] = -0.0
            found = np.empty(limit, dtype=np.int64)
            found = found[: core.highest(scores, among, found)]
            places = np.flatnonzero(among)
            wanted = places[np.argsort(-scores[places], kind="stable")][:limit]
            assert found.tolist() == wanted.tolist()


def test_the_highest_of_runs_are_those_of_their_blocks() -> None:
    rng = np.random.default_rng(3)
    for size in (0, 1, 9, 400):
        for limit in (0, 1, size, 4 * size):
            scores, lengths = np.round(rng.normal(size=size), 4), rng.integers(1, 40, size)
            among = rng.random(size) < 0.8
            runs, offsets = np.empty((2, limit), dtype=np.int64)
            found = core.highest_of_runs(scores, lengths, among, runs, offsets)
            told = scores[runs[:found]] + offsets[:found] * DEPTH_TIE
            every = [
                score + offset * DEPTH_TIE
                for score, length, there in zip(scores, lengths, among, strict=True)
                for offset in range(length if there else 0)
            ]
            assert np.allclose(told, sorted(every, reverse=True)[:limit], atol=1e-12)
            assert len(set(zip(runs[:found].tolist(), offsets.tolist(), strict=False))) == found


def test_parents_are_found_among_rows_and_others_are_not() -> None:
    rows = np.array([2, 3, 4, 9, 12], dtype=np.int32)
    parent = np.array([-1, 2, 7, 4, 2], dtype=np.int32)
    assert places_of(rows, parent).tolist() == [5, 0, 5, 2, 0, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: core.find(np.zeros(3, dtype=np.int32), KEYS, KEYS, ROWS),
        lambda: core.find(ROWS.astype(np.int64), KEYS, KEYS, ROWS),
        lambda: core.lower(np.zeros(3), np.array([5, 0, 0]), None),
        lambda: core.lower(np.zeros((3, 1)), np.zeros(4, dtype=np.int64), None),
        lambda: core.gather([np.zeros(3)], np.array([7], dtype=np.int32), [np.zeros(1)]),
        lambda: core.gather([np.zeros(3)], np.array([0], dtype=np.int32), [np.zeros(1, np.int8)]),
        lambda: core.runs(ROWS, ROWS, ROWS.view(np.uint32), ROWS, [], np.zeros(4, dtype=np.int64)),
        lambda: core.lru(np.array([0, 9]), ROWS, ROWS[:1], 4, 3, ROWS[:1].copy()),
        lambda: core.lru(np.array([0, 4]), ROWS + 7, ROWS[:1], 4, 3, ROWS[:1].copy()),
        lambda: core.LruStack([3]).use(ROWS, KEYS[:2]),
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        wrong()


def test_a_pool_that_follows_nothing_is_refused_by_its_number() -> None:
    pools = core.RankedPools()
    for _ in range(16):
        pools.join(4)
    with pytest.raises(ValueError, match="at most 16"):
        pools.join(4)
    pools.leave(3)
    with pytest.raises(ValueError, match="pool 3 follows nothing"):
        pools.use_up(3)


def test_keys_with_gaps_between_them_are_found() -> None:
    """A field of records has a stride of its own, as the page's logs hand it over."""
    records = np.zeros(8, dtype=[("key", np.uint64), ("at", np.float64)])
    records["key"] = np.arange(100, 108, dtype=np.uint64)
    index = HashIndex(16)
    rows, _ = index.ensure(records["key"], lambda count: np.arange(count, dtype=np.int32))
    assert index.find(records["key"]).tolist() == rows.tolist() == list(range(8))
    assert index.find(records["key"][::-1]).tolist() == list(range(7, -1, -1))
    index.remove(rows[::2])
    assert index.find(records["key"]).tolist() == [-1, 1, -1, 3, -1, 5, -1, 7]
