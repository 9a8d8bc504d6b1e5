"""Where a prompt parts from another one: to the token, while the engine has both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.hooks.link.late import RecentPrompts
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from paper import words

SIZE = 4
TEXT = list(range(100, 124))


def hashes(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """Of the full blocks; each covers all before it, as vLLM's do."""
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [blake2b(f"{salt}{list(tokens[:end])}".encode()).digest() for end in ends]


@pytest.mark.parametrize("shared", [4, 5, 6, 7, 12, 15])
def test_it_counts_the_tokens_that_both_have(shared: int) -> None:
    recent = RecentPrompts(SIZE)
    other = [*TEXT[:shared], *(token + 1000 for token in TEXT[shared:])]
    missing = shared // SIZE
    assert recent.add(TEXT, hashes(TEXT), 0) == 0
    assert recent.add(other, hashes(other), missing) == shared % SIZE


def test_of_several_the_one_that_goes_furthest_counts() -> None:
    recent = RecentPrompts(SIZE)
    for shared in (5, 7, 6, 0):
        other = [*TEXT[:shared], *(token + 1000 * (shared + 1) for token in TEXT[shared:])]
        recent.add(other, hashes(other), 0)
    assert recent.add(TEXT, hashes(TEXT), 1) == 3


def test_nothing_is_said_where_they_part_elsewhere_or_have_another_salt() -> None:
    recent = RecentPrompts(SIZE)
    other = [*TEXT[:6], *(token + 1000 for token in TEXT[6:])]
    recent.add(other, hashes(other), 0)
    recent.add(other, hashes(other, "theirs"), 0)
    assert recent.add(TEXT, hashes(TEXT, "mine"), 1) == 0
    assert recent.add(TEXT, hashes(TEXT), 3) == 0, "an eviction: they parted before"
    assert recent.add(TEXT, hashes(TEXT), 6) == 0, "nothing is missing"
    assert recent.add(TEXT[:22], hashes(TEXT[:22]), 1) == 2


def test_old_prompts_are_forgotten() -> None:
    recent = RecentPrompts(SIZE)
    other = [*TEXT[:6], *(token + 1000 for token in TEXT[6:])]
    recent.add(other, hashes(other), 0)
    for number in range(64):
        recent.add([number], [], 0)
    assert recent.add(TEXT, hashes(TEXT), 1) == 0


@pytest.mark.usefixtures("vllm_loaded")
def test_the_request_log_tells_the_token(paper: Callable[..., Any]) -> None:
    engine, graph = paper(Shape(blocks=97)), KVCacheGraph()
    engine.side.client.outbox.open(1 << 16)
    first = words(80, 1)
    second = [*first[:37], *words(40, 2)]
    engine.serve(first, 1)
    engine.serve(second, 1)
    graph.apply("e", [engine.side.hello(), *engine.side.client.outbox.take_all()])
    history = graph.tables.history
    miss = request_view(history, history.requests.next - 1, float).miss
    assert miss is not None
    assert (miss.reason, miss.index, miss.token) == ("diverged", 37 // BLOCK_SIZE, 37)
    assert "Token 38 of the prompt is the first that differs" in miss.sentence
