"""Which copies go first: of blocks in use, then as advised, then longest lost."""

from __future__ import annotations

import pytest
from kvgraph.graph.ranking.copies import CopyOrder


def filled(plain: bool = False) -> CopyOrder[int]:
    order: CopyOrder[int] = CopyOrder(plain)
    for block in range(6):
        order.add(block)
    return order


def first(order: CopyOrder[int], *advised: int) -> list[int]:
    return list(dict.fromkeys(order.first(advised)))


def test_copies_of_blocks_in_use_go_first_the_tail_before_the_head() -> None:
    order = filled()
    order.used([3, 4, 5, 77])
    assert first(order) == [5, 4, 3, 0, 1, 2]
    assert first(order, 2) == [5, 4, 3, 2, 0, 1]
    assert [order.stands_twice(block) for block in (2, 3, 77)] == [False, True, False]


def test_what_leaves_the_pool_is_the_last_to_go() -> None:
    order = filled()
    order.used([3, 4, 5])
    order.leaves(4)
    order.leaves(0)
    order.leaves(77)
    assert first(order) == [5, 3, 1, 2, 4, 0]
    assert len(order) == 6
    assert 77 not in order


def test_what_is_gone_is_forgotten() -> None:
    order = filled()
    order.used([0, 1])
    for block in (1, 3, 77):
        order.discard(block)
    assert first(order) == [0, 2, 4, 5]


def test_plain_is_least_recently_used_whatever_is_said() -> None:
    order = filled(plain=True)
    order.used([0, 1])
    order.leaves(2)
    assert first(order, 5) == [3, 4, 5, 1, 0, 2]


@pytest.mark.parametrize("plain", [False, True])
def test_an_empty_one_names_nobody(plain: bool) -> None:
    order: CopyOrder[int] = CopyOrder(plain)
    assert first(order) == []
