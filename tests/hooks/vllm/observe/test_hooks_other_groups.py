"""Engines of several KV cache groups: vLLM's scheduler and managers, and which group ended a match.

What is right is said by a model of the test's own: sets of the hashes that the pool's blocks have.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.words.words import miss_sentence
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.reasons import REASON_NAMES, Reason
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import CacheGroup, GroupKind, RequestStarted
from kvgraph.hooks.keys import key_of
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from kvgraph_bench.sidecars.sidecar_process import SidecarProcess, wait_until
from paper import text, words

pytestmark = pytest.mark.usefixtures("vllm_loaded")
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
    """An engine, and for each request which groups could not go on where its match ended.

    Of a request that is looked up several times, the last counts.
    """

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
        """The groups that lack what a match of one block more needs, unless full attention lacks
        the block itself or it cannot be matched."""
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


def test_the_graph_says_it_in_words(paper: Callable[..., Any]) -> None:
    watched = Watched(paper, Shape(blocks=50, warm=None, windows=(None, 70)))
    lose_the_window(watched.engine)
    watched.engine.serve([*BRANCH, *words(40, 9)], output=4)
    history = watched.graph.tables.history
    record = history.requests.record(history.requests.next - 1)
    reason, place = Reason(int(record["reason"])), int(record["detail"])
    assert (reason, place) == (Reason.OTHER_GROUP, 1)
    assert history.totals[Reason.OTHER_GROUP] == 1
    assert history.totals[Reason.UNKNOWN] == 0
    where = int(record["index"]), int(record["asked"])
    said = miss_sentence(reason, place, where, None, None, None, None, history.group("e", place))
    assert said == (
        f"Block {where[0] + 1} of 12 is in the pool, but cache group 1 (a sliding window of 70 "
        "tokens) had let go of a part of the window that ends there."
    )


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
