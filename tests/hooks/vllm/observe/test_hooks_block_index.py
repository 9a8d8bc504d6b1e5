"""From a key to the block that holds it, in every group of layers; and where prompts part."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.reasons import REASON_NAMES, Reason
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import CacheGroup, GroupKind, RequestStarted
from kvgraph.hooks.keys import key_in_pool, key_of, pack_hashes, unpack
from kvgraph.hooks.link.late import RecentPrompts
from kvgraph.hooks.vllm.index import BlockIndex
from kvgraph_bench.hotpath import cached_pool, new_pool, request_maker
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from kvgraph_bench.sidecars.sidecar_process import SidecarProcess, wait_until
from paper import text, words
from seeded import seeded

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def computed(pool: Any, make: Any, tokens: list[int]) -> tuple[list[int], list[Any]]:
    """Keys and blocks of a prompt that was computed, not found."""
    request = make(tokens)
    blocks = pool.get_new_blocks(len(request.block_hashes))
    pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, 0)
    return unpack(pack_hashes(request.block_hashes)), blocks


@pytest.mark.parametrize("hears_all", [True, False])
def test_a_key_is_gone_only_with_the_last_block_that_holds_it(hears_all: bool) -> None:
    pool, make = new_pool(32), request_maker()
    index = BlockIndex(pool, hears_all=hears_all)
    keys, first = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    same, second = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    assert keys == same
    index.cached(keys, [block.block_id for block in first])
    index.cached(keys, [block.block_id for block in second])
    pool.free_blocks([*first, *second])
    for blocks, gone in ((second, []), (first, keys)):
        hashes = [block.block_hash for block in blocks]
        pool.evict_blocks({block.block_id for block in blocks})
        assert list(index.forget(hashes, keys)) == gone
        assert [index.find(key) for key in keys] == ([None] * 4 if gone else first)


def test_holders_are_counted_whatever_the_pool_has_by_now() -> None:
    """Steps are noted late: both holders of the keys went, and a third block has them again."""
    pool, make = new_pool(32), request_maker()
    index = BlockIndex(pool)
    keys, first = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    _, second = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    hashes = [block.block_hash for block in first]
    pool.free_blocks([*first, *second])
    pool.evict_blocks({block.block_id for block in (*first, *second)})
    _, third = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    pool.free_blocks(third)
    for blocks in (first, second):
        index.cached(keys, [block.block_id for block in blocks])
    assert list(index.forget(hashes, keys)) == []
    assert list(index.forget(hashes, keys)) == keys
    index.cached(keys, [block.block_id for block in third])
    assert [index.find(key) for key in keys] == third
    pool.evict_blocks({block.block_id for block in third})
    assert list(index.forget(hashes, keys)) == keys


def test_what_may_be_counted_wrong_is_looked_for_in_the_pool() -> None:
    pool, make = new_pool(32), request_maker()
    index = BlockIndex(pool)
    keys, first = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    hashes = [block.block_hash for block in first]
    for _ in range(2):
        index.cached(keys, [block.block_id for block in first])
    index.doubt()  # as where a step could not be noted in full
    assert list(index.forget(hashes[:2], keys[:2])) == []
    pool.free_blocks(first)
    pool.evict_blocks({block.block_id for block in first})
    assert list(index.forget(hashes, keys)) == keys


def test_changes_are_noted_one_at_a_time_and_in_order() -> None:
    """By whichever thread: a second one waits until the first has noted its change."""
    index = BlockIndex(new_pool(32))
    noted: list[int] = []
    begun, go_on = Event(), Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(10)
        noted.append(1)

    index.late.add(first)
    index.late.add(lambda: noted.append(2))
    others = [Thread(target=index.catch_up) for _ in range(2)]
    others[0].start()
    assert begun.wait(10)
    others[1].start()
    assert noted == []
    go_on.set()
    for each in others:
        each.join(10)
    assert noted == [1, 2]


def test_many_keys_are_found_as_one_is() -> None:
    rng, now = seeded(), 1000.0
    pool, keys, index = cached_pool(400, lambda: now)
    free = pool.free_block_queue.get_all_free_blocks()
    pool.touch(rng.sample(free, 60))
    pool.evict_blocks({block.block_id for block in rng.sample(free, 60)})
    now = 1005.0
    index.freed([block.block_id for block in rng.sample(free, 60)])
    asked = np.array(rng.choices([*keys.tolist(), 0, 12345], k=500), dtype=np.uint64)
    for since in (1000.0, 1001.0, 1006.0):
        first = sorted(np.unique(asked, return_index=True)[1].tolist())
        one_by_one = [(at, index.find(int(asked[at]))) for at in first]
        expected = [
            (at, block) for at, block in one_by_one if block and index.freed_at(block) <= since
        ]
        found = index.find_unused(asked, since)
        assert list(found.places) == [at for at, _ in expected]
        assert all(one is other for one, (_, other) in zip(found.blocks, expected, strict=True))
        assert found.ids.tolist() == [block.block_id for block in found.blocks]
        assert found.hashes == [block.block_hash for block in found.blocks]


def test_keys_that_no_block_holds_do_not_pile_up() -> None:
    """As of blocks that vLLM skipped: their eviction is never reported."""
    pool, keys, index = cached_pool(64)
    for start in range(0, 10_000, 10):
        index.cached(range(start, start + 10), [0] * 10)
    assert len(index) <= 2 * 64
    by_key = {key_in_pool(b.block_hash): b for b in pool.free_block_queue.get_all_free_blocks()}
    assert all(index.find(key) is by_key[key] for key in keys.tolist())


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
    assert (miss.reason, miss.index, miss.token) == ("diverged", 37 // BLOCK_SIZE, 37)
    assert "Token 38 of the prompt is the first that differs" in miss.sentence


GROUPS = {
    "full attention and windows": (None, 70),
    "windows first": (70, None),
    "windows of two lengths": (None, 40, 100),
    "full attention twice, and a window": (None, None, 70),
    "a window of one token": (None, 1),
    "states and full attention": (0, None),
    "all kinds": (None, 50, 0),
    "full attention alone": (None,),
}


class Watched:
    """An engine, and for each request which groups ended its last lookup."""

    def __init__(self, paper: Callable[..., Any], shape: Shape) -> None:
        self.engine = paper(shape, clock=time.monotonic)
        self.engine.side.client.outbox.open()
        self.windows = shape.windows
        self.right: dict[str, set[int]] = {}
        self.found: dict[str, tuple[int, Sequence[int]]] = {}
        manager = self.engine.scheduler.kv_cache_manager
        self._look, self._manager = manager.get_computed_blocks, manager
        manager.get_computed_blocks = self._looked_up
        self.graph, self.starts = KVCacheGraph(), list[RequestStarted]()
        self.graph.apply("e", [self.engine.side.hello()])
        self._step, self.engine.step = self.engine.step, self._stepped

    def _looked_up(self, request: Any) -> Any:
        found = self._look(request)
        self.right[request.request_id] = self._lacking(request, found[1])
        coordinator = self._manager.coordinator
        if len(self.windows) > 1:
            hits = coordinator.find_longest_cache_hit_per_group(
                request.block_hashes, request.num_tokens - 1
            )[1]
            self.found[request.request_id] = found[1], hits
        return found

    def _lacking(self, request: Any, tokens: int) -> set[int]:
        """The groups that lack what one block more needs, if that block can be matched at all."""
        blocks = tokens // BLOCK_SIZE + 1
        if blocks * BLOCK_SIZE >= request.num_tokens:
            return set()
        held = defaultdict(set)
        for block in self.engine.pool.blocks:
            if block.block_hash is not None:
                held[int.from_bytes(block.block_hash[-4:], "big")].add(block.block_hash[:-4])
        lacking = set()
        for group, window in enumerate(self.windows):
            needed = range(blocks)
            if window is not None:
                reach = max(1, -(-(window - 1) // BLOCK_SIZE))
                needed = range(max(0, blocks - reach), blocks)
            if any(request.block_hashes[each] not in held[group] for each in needed):
                lacking.add(group)
        observed = self.windows.index(None)
        return set() if observed in lacking else lacking

    def _stepped(self) -> None:
        """A sidecar hears of each step at once."""
        self._step()
        events = self.engine.side.client.outbox.take_all()
        self.graph.apply("e", events)
        self.starts += [event for event in events if isinstance(event, RequestStarted)]


def play(engine: Any, rng: random.Random, requests: int) -> None:
    """Conversations that grow, and others that leave them at some earlier place."""
    chats = [words(rng.randrange(20, 300), seed) for seed in range(6)]
    for number in range(requests):
        at = rng.randrange(len(chats))
        chat = chats[at]
        if rng.random() < 0.5:
            chat = chat[: rng.randrange(1, len(chat) + 1)]
        chats[at] = (chat + words(rng.randrange(5, 80), 100 + number))[:420]
        engine.ask(chats[at], rng.randrange(1, 20))
        if rng.random() < 0.6:
            engine.settle()
    engine.settle()


@pytest.mark.parametrize("windows", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_start_tells_which_group_ended_its_match(
    paper: Callable[..., Any], windows: tuple[int | None, ...], asynchronous: bool
) -> None:
    shape = Shape(blocks=70 * len(windows), asynchronous=asynchronous, warm=None, windows=windows)
    watched, seen = Watched(paper, shape), Counter[int | None]()
    play(watched.engine, random.Random(1), 120)
    for start in watched.starts:
        right = watched.right[start.request_id]
        assert (start.lacking in right) if right else start.lacking is None, start
        if len(windows) > 1:
            tokens, hits = watched.found[start.request_id]
            assert tokens == start.cached_tokens
            assert (start.lacking is not None) == (hits[watched.windows.index(None)] > tokens)
        seen[start.lacking] += 1
    assert (len(seen) > 1) == (len(set(windows)) > 1)
    totals = watched.graph.tables.history.totals
    assert totals[Reason.OTHER_GROUP] == len(watched.starts) - seen[None]
    assert totals[Reason.UNKNOWN] == 0
    assert totals[Reason.EVICTED] > 0
    assert watched.engine.is_whole()


def test_the_hello_names_the_groups(paper: Callable[..., Any]) -> None:
    engine = paper(Shape(blocks=120, warm=None, windows=(None, 70, 0)), clock=time.monotonic)
    assert engine.side.hello().groups == (
        CacheGroup(GroupKind.FULL, 0, BLOCK_SIZE),
        CacheGroup(GroupKind.WINDOW, 70, BLOCK_SIZE),
        CacheGroup(GroupKind.STATE, 0, BLOCK_SIZE),
    )


BRANCH = text(16, 1)[: 10 * BLOCK_SIZE]  # what two prompts share; the first goes on behind it


def lose_the_window(engine: Any) -> None:
    """Of a prompt that begins like ``BRANCH``, full attention keeps all and the window its end."""
    engine.serve(text(16, 1), output=4)
    for seed in range(2, 5):
        engine.serve(text(4, seed), output=4)


def test_a_sidecar_counts_it_by_its_name(paper: Callable[..., Any], socket_directory: Path) -> None:
    """Through observer, wire and sidecar."""
    with SidecarProcess(socket_directory) as sidecar:
        shape = Shape(blocks=50, warm=None, windows=(None, 70))
        engine = paper(shape, endpoint=sidecar.endpoint)
        assert wait_until(lambda: engine.side.client.standing.linked, 20.0)
        lose_the_window(engine)
        engine.serve([*BRANCH, *words(40, 9)], output=4)
        assert wait_until(lambda: by_reason(sidecar)["other_group"] == 1, 20.0)
        assert by_reason(sidecar)["unknown"] == 0


def by_reason(sidecar: SidecarProcess) -> Counter[str]:
    samples = sidecar.samples().items()
    return Counter({
        name: int(value)
        for name in REASON_NAMES
        for sample, value in samples
        if "kvgraph_misses_total" in sample and f'reason="{name}"' in sample
    })  # fmt: skip


@pytest.mark.parametrize("windows", [(None, 70), (None, 0)], ids=["window", "state"])
@pytest.mark.parametrize("protected", [False, True])
def test_what_is_protected_is_kept_in_every_group(
    paper: Callable[..., Any], windows: tuple[int | None, ...], protected: bool
) -> None:
    """A prefix that full attention alone kept would be found no more."""
    engine = paper(Shape(blocks=120, warm=None, windows=windows), clock=lambda: 0.0)
    head = words(8 * BLOCK_SIZE, 1)
    engine.serve(head + words(20, 3))
    keys = [key_of(each) for each in engine.make("head", head, 1).block_hashes]
    if protected:
        engine.side.client.hold_ranking(
            replace(EvictionRanking.empty(1e6), protected=as_keys(keys))
        )
    for seed in range(12):
        engine.serve(words(200, 50 + seed), output=4)
    request = engine.make("again", head + words(40, 9), 1)
    found = engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
    assert found == (len(head) if protected else 0)


@pytest.fixture
def through_reset(paper: Callable[..., Any]) -> Watched:
    """An engine with a state beside full attention, which keeps the last one of a prompt alone."""
    return Watched(paper, Shape(blocks=120, warm=None, windows=(None, 0)))


def last_reason(watched: Watched) -> Reason:
    log = watched.graph.tables.history.requests
    return Reason(int(log.record(log.next - 1)["reason"]))


def test_what_a_reset_took_is_not_said_to_be_in_the_pool(through_reset: Watched) -> None:
    """vLLM's reset makes another map of the cached blocks."""
    through_reset.engine.serve(text(6, 1))
    assert through_reset.engine.reset()
    through_reset.engine.serve([*text(6, 1)[: 3 * BLOCK_SIZE], *text(3, 9)])
    assert last_reason(through_reset) is Reason.RESET


def test_what_another_group_lacks_is_told_after_a_reset_too(through_reset: Watched) -> None:
    assert through_reset.engine.reset()
    through_reset.engine.serve(text(6, 1))
    through_reset.engine.serve([*text(6, 1)[: 3 * BLOCK_SIZE], *text(3, 9)])
    assert last_reason(through_reset) is Reason.OTHER_GROUP
