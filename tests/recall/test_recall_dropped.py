"""What an opted-in session drops has a copy before it leaves the pool, whoever presses for room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from paper import words
from recall_usage import used

pytestmark = pytest.mark.usefixtures("vllm_loaded")
ASKS: dict[str, Any] = {"kv_transfer_params": {"kvgraph": {"recall": True, "session": "mine"}}}
POOL = 33  # blocks, of which one is vLLM's own


HEAD, FILE = words(2 * BLOCK_SIZE, 1), words(12 * BLOCK_SIZE, 2)


@pytest.fixture
def engine(recalls: Callable[..., Any]) -> Any:
    return recalls(Shape(blocks=POOL, warm=256), SpliceLimits(margin=4))


def in_pool(engine: Any, hashes: list[bytes]) -> list[bytes]:
    held = engine.pool.cached_block_hash_to_block
    return [each for each in hashes if held.get_one_block(each + bytes(4)) is not None]


def without_copy(engine: Any, hashes: list[bytes]) -> list[bytes]:
    directory = engine.side.bridge.ledger.directory
    return [each for each in hashes if directory.warm(each) is None]


def recovered(engine: Any) -> int:
    """Serve a turn that begins with the file; how many tokens were spliced for it."""
    return used(engine, [*FILE, *words(20, 7)], **ASKS)["spliced"]


def test_a_dropped_file_has_a_copy_when_the_pool_has_forgotten_it(engine: Any) -> None:
    request = engine.ask([*HEAD, *FILE, *words(10, 3)], 2, **ASKS)
    engine.settle()
    file = list(request.block_hashes[2:14])
    engine.serve([*HEAD, *words(30, 4)], 2, **ASKS)  # the file was dropped
    for seed in range(6):
        engine.serve(words(20 * BLOCK_SIZE, 100 + seed))
    assert not in_pool(engine, file)
    assert not without_copy(engine, file)
    assert recovered(engine) == len(FILE) - 4


def test_it_has_one_although_the_advice_says_that_nothing_is_worth_a_copy(engine: Any) -> None:
    spill = engine.side.bridge.spill
    advice = EvictionRanking.empty(0.0)
    engine.side.bridge.spill = lambda _, wanted, taken: spill(advice, wanted, taken)
    request = engine.ask([*HEAD, *FILE, *words(10, 3)], 2, **ASKS)
    engine.settle()
    file = list(request.block_hashes[2:14])
    for seed in range(6):
        engine.serve(words(20 * BLOCK_SIZE, 100 + seed))
    assert not in_pool(engine, file)
    assert not without_copy(engine, file)


def test_it_has_one_although_others_take_its_blocks_as_soon_as_its_turn_ends(engine: Any) -> None:
    file = words((POOL - 6) * BLOCK_SIZE, 5)  # the turn fills the pool, so the next takes its end
    request = engine.ask([*HEAD, *file, *words(10, 3)], 20, **ASKS)
    for seed in range(6):
        engine.ask(words((POOL - 3) * BLOCK_SIZE, 100 + seed), 2)
    engine.settle()
    hashes = list(request.block_hashes[2 : 2 + len(file) // BLOCK_SIZE])
    assert not in_pool(engine, hashes)
    assert not without_copy(engine, hashes)
