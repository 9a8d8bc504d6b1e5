"""A worker brings tokens to other positions: the bytes are those of a rotation, and no others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.hooks.tiers.jobs import JobDone, Load, Spill, SpliceRun, TierWork
from kvgraph.hooks.tiers.mover import TierMover
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.layout import PagedKv, new_memory
from kvgraph.kernels.layout_engines import cpu_layout
from kvgraph.kernels.rope import Rope
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from paper import words
from recall_usage import used

pytestmark = pytest.mark.usefixtures("vllm_loaded")

LAYERS, BLOCKS, HEADS, TOKENS, DIMS = 2, 12, 2, 32, 32
ROPE = Rope(1.0 / (10_000 ** (torch.arange(0, DIMS, 2, dtype=torch.float64) / DIMS)))


def new_mover(
    isa: str = "vec", dtype: torch.dtype = torch.float32, rope: Rope | None = ROPE
) -> Any:
    cache = new_memory(cpu_layout(isa, LAYERS, BLOCKS, HEADS, TOKENS, DIMS, dtype))
    cache.memory.normal_(generator=torch.Generator().manual_seed(3))
    arena = Arena.for_cache(cache.layout, 8 * cache.layout.block_bytes)
    return TierMover(cache, arena, rope=rope)


def done(mover: TierMover, *jobs: Any) -> list[JobDone]:
    mover.submit(TierWork(jobs))
    answers: list[JobDone] = []
    deadline = time.monotonic() + 20
    while len(answers) < len(jobs) and time.monotonic() < deadline:
        answers += mover.answers.take_answer().done
    return answers


def tokens_at(cache: PagedKv, slots: list[int], plane: str) -> Any:
    """What stands at token slots: [layers, slots, heads, dims]."""
    layout = cache.layout
    layer, head = torch.arange(layout.layers), torch.arange(layout.heads)
    at = layout.address(
        getattr(layout, plane), layer[:, None, None, None],
        torch.tensor(slots)[None, :, None, None], head[None, None, :, None],
        torch.arange(DIMS)[None, None, None, :],
    )  # fmt: skip
    return cache.memory[at].float()


@pytest.mark.parametrize(
    ("isa", "dtype"), [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16)]
)
def test_exact_blocks_and_moved_tokens_come_in_one_load(isa: str, dtype: torch.dtype) -> None:
    mover = new_mover(isa, dtype)
    before = PagedKv(mover.cache.memory.clone(), mover.cache.layout)
    (spilled,) = done(mover, Spill(1, (1, 2, 3), (11, 12, 13)))
    assert not spilled.failed
    # Tokens 5 to 41 of blocks 2 and 3 go behind the exact block 1, 30 positions to the front.
    runs = (
        SpliceRun(12, 5, 7 * TOKENS, 27, -30),
        SpliceRun(13, 0, 7 * TOKENS + 27, 5, -30),
        SpliceRun(13, 5, 8 * TOKENS, 5, -30),
    )
    (loaded,) = done(mover, Load(2, (11,), (6,), {}, "r", runs, (7, 8)))
    assert not loaded.failed
    exact = [6 * TOKENS + at for at in range(TOKENS)]
    source = [2 * TOKENS + at for at in range(5, 32)] + [3 * TOKENS + at for at in range(10)]
    target = [7 * TOKENS + at for at in range(37)]
    for plane in ("key", "value"):
        there = tokens_at(mover.cache, exact, plane)
        assert torch.equal(there, tokens_at(before, [1 * TOKENS + at for at in range(32)], plane))
    cos, sin = ROPE.rotation(torch.full((37,), -30))
    for layer, keys in enumerate(tokens_at(before, source, "key")):
        turned = ROPE.rotate(keys, cos, sin).to(dtype).float()
        assert torch.equal(tokens_at(mover.cache, target, "key")[layer], turned)
    values = tokens_at(mover.cache, target, "value")
    assert torch.equal(values, tokens_at(before, source, "value"))
    untouched = [at for at in range(BLOCKS * TOKENS) if at not in (*exact, *target)]
    for plane in ("key", "value"):
        after = tokens_at(mover.cache, untouched, plane)
        assert torch.equal(after, tokens_at(before, untouched, plane))
    mover.close()


def test_a_model_whose_keys_cannot_be_moved_fails_the_load_alone() -> None:
    mover = new_mover(rope=None)
    done(mover, Spill(1, (1,), (11,)))
    runs = (SpliceRun(11, 0, 7 * TOKENS, 8, 3),)
    (loaded,) = done(mover, Load(2, (11,), (6,), {}, "r", runs, (7,)))
    assert loaded.failed == {0, 1}
    assert mover.answers.take_loaded() == ({"r"}, {6, 7})
    (again,) = done(mover, Load(3, (11,), (6,), {}, "s"))
    assert not again.failed
    mover.close()


def test_a_copy_that_is_not_there_fails_the_load() -> None:
    mover = new_mover()
    done(mover, Spill(1, (1,), (11,)))
    (loaded,) = done(mover, Load(2, (), (), {}, "r", (SpliceRun(99, 0, 7 * TOKENS, 8, 3),), (7,)))
    assert loaded.failed == {0}
    mover.close()


ASKS: dict[str, Any] = {"kv_transfer_params": {"kvgraph": {"recall": True, "session": "mine"}}}
POOL = 33  # blocks, of which one is vLLM's own


HEAD, FILE = words(2 * BLOCK_SIZE, 1), words(12 * BLOCK_SIZE, 2)


@pytest.fixture
def engine(recalls: Callable[..., Any]) -> Any:
    return recalls(Shape(blocks=POOL, warm=256), SpliceLimits(margin=4))


def has_copies_alone(engine: Any, hashes: list[bytes]) -> bool:
    """Whether the pool has forgotten all of these blocks, and each has a copy."""
    held, directory = engine.pool.cached_block_hash_to_block, engine.side.bridge.ledger.directory
    assert not any(held.get_one_block(each + bytes(4)) for each in hashes)
    return all(directory.warm(each) is not None for each in hashes)


def after_others(engine: Any, request: Any) -> list[bytes]:
    """The hashes of the file in a request, after it and others have been served."""
    engine.settle()
    hashes = list(request.block_hashes[2:14])
    engine.serve([*HEAD, *words(30, 4)], 2, **ASKS)  # the file was dropped
    for seed in range(6):
        engine.serve(words(20 * BLOCK_SIZE, 100 + seed))
    return hashes


def test_a_dropped_file_has_a_copy_when_the_pool_has_forgotten_it(engine: Any) -> None:
    request = engine.ask([*HEAD, *FILE, *words(10, 3)], 2, **ASKS)
    assert has_copies_alone(engine, after_others(engine, request))
    assert used(engine, [*FILE, *words(20, 7)], **ASKS)["spliced"] == len(FILE) - 4


def test_it_has_one_although_the_advice_says_that_nothing_is_worth_a_copy(engine: Any) -> None:
    spill = engine.side.bridge.spill
    advice = EvictionRanking.empty(0.0)
    engine.side.bridge.spill = lambda _, wanted, taken: spill(advice, wanted, taken)
    request = engine.ask([*HEAD, *FILE, *words(10, 3)], 2, **ASKS)
    assert has_copies_alone(engine, after_others(engine, request))


def test_it_has_one_although_others_take_its_blocks_as_soon_as_its_turn_ends(engine: Any) -> None:
    file = words((POOL - 6) * BLOCK_SIZE, 5)  # the turn fills the pool, so the next takes its end
    request = engine.ask([*HEAD, *file, *words(10, 3)], 20, **ASKS)
    for seed in range(6):
        engine.ask(words((POOL - 3) * BLOCK_SIZE, 100 + seed), 2)
    engine.settle()
    assert has_copies_alone(engine, list(request.block_hashes[2 : 2 + len(file) // BLOCK_SIZE]))
