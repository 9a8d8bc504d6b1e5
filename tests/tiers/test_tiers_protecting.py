"""What tiers take from the pool, at once and beside what is computed, is not what is protected."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import key_of, pack_hashes
from kvgraph_bench.hotpath import BLOCK_SIZE, answer, connected, new_pool, request_maker

pytestmark = pytest.mark.usefixtures("vllm_loaded")
STEP = SimpleNamespace(total_num_scheduled_tokens=16)
COMPUTED = 16  # blocks that one step computes at most


class Served:
    """An engine with tiers but without a model; what it takes from its pool is looked at.

    Attributes:
        needless: Protected blocks that were taken while others were free.
    """

    def __init__(self) -> None:
        self.now, self.needless = 1000.0, 0
        self.pool, self._make = new_pool(201), request_maker()
        self.connector = connected(
            self.pool, 400, lambda: self.now, batched_tokens=COMPUTED * BLOCK_SIZE, requests=4
        )
        self.side = self.connector.side
        self.protected: set[int] = set()
        self._take, self.pool.get_new_blocks = self.pool.get_new_blocks, self._taken
        self._running: dict[str, list[Any]] = {}

    def serve(self, text: list[int], tag: object = None) -> Any:
        request = self.begin(text, tag)
        self.steps(4)
        self.end(request)
        return request

    def begin(self, text: list[int], tag: object = None) -> Any:
        request = self._make(text)
        request.kv_transfer_params = {"kvgraph": tag or {}}
        self.connector.on_new_request(request)
        while True:
            found = (self.pool.get_cached_block(each, [0]) for each in request.block_hashes)
            blocks = [each[0] for each in itertools.takewhile(bool, found)]
            hits, count = len(blocks), len(request.block_hashes)
            to_load, _ = self.connector.get_num_new_matched_tokens(request, hits * BLOCK_SIZE)
            if to_load is not None:
                break
            self.steps(1)
        self.pool.touch(blocks)
        blocks += self.pool.get_new_blocks(to_load // BLOCK_SIZE)
        while len(blocks) < count:
            blocks += self.pool.get_new_blocks(min(COMPUTED, count - len(blocks)))
            if len(blocks) < count:
                self.steps(1)
        ids = [block.block_id for block in blocks]
        given = SimpleNamespace(get_block_ids=lambda: (ids,), blocks=(blocks,))
        self.connector.update_state_after_alloc(request, given, to_load)
        self._running[request.request_id] = blocks
        request.num_computed_tokens = count * BLOCK_SIZE
        self.pool.cache_full_blocks(request, blocks, hits, count, BLOCK_SIZE, 0)
        return request

    def end(self, request: Any) -> None:
        blocks = self._running.pop(request.request_id)
        ids = [block.block_id for block in blocks]
        self.connector.request_finished_all_groups(request, (ids,))
        self.pool.free_blocks(reversed(blocks))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.now += 0.1
            answer(self.connector, self.connector.build_connector_meta(STEP))

    def advise(self, wanted: list[bytes]) -> None:
        """LRU rules: a sidecar names what is protected, and what to bring back."""
        held = {key_of(b.block_hash[:-4]) for b in self.pool.blocks if b.block_hash}
        none = np.empty(0, dtype=np.uint64)
        protected = np.array(sorted(held & self.protected), dtype=np.uint64)
        self.side.client.hold_ranking(EvictionRanking(1, self.now, none, protected, none, none))
        self.side.client.hold_wanted(as_keys(pack_hashes(wanted)))

    def _taken(self, count: int) -> list[Any]:
        free = self.pool.free_block_queue.get_all_free_blocks()
        marks = [b.block_hash and key_of(b.block_hash[:-4]) in self.protected for b in free]
        self.needless += min(sum(map(bool, marks[:count])), sum(not m for m in marks[count:]))
        return self._take(count)


@pytest.mark.parametrize("way", ["loaded", "prefetched"])
def test_what_copies_come_back_to_is_not_protected(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """40 blocks are loaded at once where a step computes 16; up to 64 are brought back unasked."""
    monkeypatch.setenv("AITHER_KVCACHE_HINTS", "all")
    engine, rng = Served(), random.Random(1)
    rules = {"segments": [{"layer": "rules", "start": 0, "end": 20 * BLOCK_SIZE}]}
    texts = [[rng.randrange(250) for _ in range(40 * BLOCK_SIZE)] for _ in range(12)]
    hashes = [engine.serve(text).block_hashes for text in texts]
    for number in range(2):
        head = engine.serve([300 + number, *range(20 * BLOCK_SIZE - 1)], rules)
        engine.protected.update(map(key_of, head.block_hashes))
    for _ in range(60):
        one, other = rng.sample(range(len(texts)), 2)
        if way == "loaded":
            engine.advise([])
            begun = [engine.begin(texts[one]), engine.begin(texts[other])]
            engine.steps(4)
            for request in begun:
                engine.end(request)
            continue
        engine.advise([*hashes[one], *hashes[other]])
        engine.steps(4)
        for again in (one, other):
            engine.serve(texts[again])
        for _ in range(rng.randrange(6)):
            engine.serve([rng.randrange(250) for _ in range(rng.randrange(3, 14) * BLOCK_SIZE)])
    counts = engine.side.bridge.ledger.counts
    assert getattr(counts, way) > 500, "too little came back to tell"
    assert engine.needless == 0
