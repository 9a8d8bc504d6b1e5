"""Protected blocks are evicted only when nothing else is free, whatever becomes of the sidecar."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from budgets import small_or_large
from kvgraph.advisor.config.sections import PrefetchConfig
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import Rules
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import BlocksResident
from kvgraph.hooks.keys import key_in_pool, key_of, pack_hashes, unpack
from kvgraph.hooks.link.client import AdvisorClient, ClientOptions
from kvgraph.hooks.settings import PROTECT_STALE_S, PROTECT_STALE_VARIABLE, engine_settings
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.free_queue.protection import ProtectedKeys
from kvgraph_bench.hotpath import STEP, cached_pool, connected, new_pool, request_maker
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, PaperEngine, Shape
from pool_requests import finish, ranking, start

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def key(block: Any) -> int | None:
    return None if block.block_hash is None else key_in_pool(block.block_hash)


class Pool:
    """A real block pool, full, under an arranger: what is taken from it, and what that costs."""

    def __init__(
        self, blocks: int, blocks_per_step: int = 16, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pool, keys, self.index = cached_pool(blocks, clock)
        self.keys: list[int] = keys.tolist()
        self.arranger = FreeQueueArranger(self.pool, self.index, blocks_per_step, clock=clock)
        self.lost: list[int] = []  # protected keys, in the order in which they went
        self._make = request_maker()

    def take(self, count: int, protected: set[int]) -> list[Any]:
        free = [key(block) for block in self.pool.free_block_queue.get_all_free_blocks()]
        going = [each for each in free[:count] if each in protected]
        self.lost += going
        self.arranger.evicted([each for each in free[:count] if each is not None])
        return self.pool.get_new_blocks(count)

    def serve(self, blocks: int, seed: int, protected: set[int]) -> list[int]:
        """A request of new text comes and ends; its keys."""
        request = self._make([seed, *range(1, blocks * BLOCK_SIZE)])
        mine = self.take(blocks, protected)
        self.pool.cache_full_blocks(request, mine, 0, blocks, BLOCK_SIZE, 0)
        keys = unpack(pack_hashes(request.block_hashes))
        self.index.remember(keys, [block.block_id for block in mine])
        self.pool.free_blocks(reversed(mine))
        return keys


def test_the_head_is_not_looked_at_again_while_what_was_seen_there_lasts() -> None:
    world = Pool(1001)
    precious = world.keys[::7]
    advice = ranking(protected=precious)
    world.arranger.step(None, advice)
    looks: list[object] = []
    queue = world.pool.free_block_queue
    look = queue.iter_blocks_after
    queue.iter_blocks_after = lambda cursor: looks.append(cursor) or look(cursor)
    for number in range(64):
        world.arranger.step(None, advice)
        world.serve(1, number + 5, set(precious))
    assert len(looks) <= 5


def test_among_none_but_protected_ones_what_becomes_free_goes_first() -> None:
    world = Pool(601, blocks_per_step=8)
    precious = world.keys[:500]
    advice = ranking(protected=precious)
    world.arranger.step(None, advice)
    held = world.take(100, set(precious))
    assert world.lost == []
    world.arranger.step(None, advice)
    world.take(8, set(precious))
    assert world.lost == precious[:8]
    world.pool.free_blocks(held[:40])  # blank ones go first by vLLM's own rule
    for number in range(10):  # in the end what the first of these requests left
        world.arranger.step(None, advice)
        world.serve(8, number + 5, set(precious))
    assert world.lost == precious[:8]


def test_a_reset_forgets_what_was_protected() -> None:
    world = Pool(101)
    world.arranger.step(ranking(protected=world.keys))
    world.arranger.clear()
    world.arranger.evicted(world.keys)
    assert world.arranger.protected_evicted == 0


def test_protection_is_remembered_for_longer_than_an_order_is_trusted() -> None:
    now = 100.0
    options = ClientOptions(max_stale_s=2.0, protect_stale_s=30.0)
    client = AdvisorClient("ipc:///nowhere", object(), options, lambda: now)  # type: ignore[arg-type]
    protecting = ranking(protected=[1], ts=now)
    client.hold_ranking(protecting)
    now += 10
    assert client.ranking() is None
    assert client.remembered() is protecting
    now += 21
    assert client.remembered() is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", PROTECT_STALE_S), ("5", 5.0), ("0", 0.0), ("-1", 60.0), ("nan", 60.0), ("soon", 60.0)],
)
def test_how_long_is_configuration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, seconds: float
) -> None:
    monkeypatch.setenv(PROTECT_STALE_VARIABLE, text)
    assert engine_settings("protect_stale_s").protect_stale_s == seconds
    refused = text not in ("", "5", "0")
    assert (PROTECT_STALE_VARIABLE in caplog.text) is refused


def test_blocks_of_a_preempted_request_are_known() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    assert "preempted_req_ids" in {field.name for field in dataclasses.fields(SchedulerOutput)}
    pool = new_pool(64)
    connector = connected(pool)
    request = request_maker()(list(range(10 * BLOCK_SIZE)))
    blocks = start(connector, pool, request)
    request.num_computed_tokens = 0
    pool.free_blocks(reversed(blocks))  # as vLLM does to make room, without a word to connectors
    output = SimpleNamespace(
        total_num_scheduled_tokens=1, preempted_req_ids={request.request_id, "stranger"}
    )
    connector.build_connector_meta(output)
    index = connector.side.index
    keys = unpack(pack_hashes(request.block_hashes))
    assert [index.find(each) for each in keys] == blocks


class Listener:
    """A sidecar that ranks what it hears, as late as the test wants; all real but the socket."""

    def __init__(self, connector: Any, clock: Callable[[], float]) -> None:
        self._side, self._clock = connector.side, clock
        self.graph = KVCacheGraph(rules=Rules(protected_share=0.5), clock=clock)
        self._client = self._side.client
        self._client.outbox.open()
        self._client.linked_since = clock()
        self.graph.apply("engine", [self._side.hello()])
        self._unheard: list[tuple[float, list[Any]]] = []
        self._heard_until = clock()

    def hears(self, late_s: float) -> None:
        """Take what was sent, apply what is so old, and rank now."""
        now = self._clock()
        self._unheard.append((now, self._client.outbox.take_all()))
        while self._unheard and self._unheard[0][0] <= now - late_s:
            self._heard_until, events = self._unheard.pop(0)
            self.graph.apply("engine", events)
        made = self.graph.rank("engine", 4096)
        self._client.hold_ranking(dataclasses.replace(made, ts=now, known_of=self._heard_until))


@pytest.mark.parametrize("late_s", [0.0, 2.0, 11.0, 45.0])
def test_rules_outlive_any_delay_of_a_sidecar_that_ranks_in_time(late_s: float) -> None:
    now, pool, make = 1000.0, new_pool(401), request_maker()
    connector = connected(pool, clock=lambda: now, batched_tokens=256, requests=4)
    sidecar = Listener(connector, lambda: now)
    rng, precious, lost = random.Random(3), set[bytes](), 0
    for number in range(240):
        says = number < 3 or rng.random() < 0.04
        head = rng.randrange(3) if says else 10 + number
        tokens = [head, *range(1, 7 * BLOCK_SIZE), *(rng.randrange(250) for _ in range(80))]
        request = make(tokens)
        request.kv_transfer_params = {"kvgraph": rules(7) if says else {}}
        cached = [pool.get_cached_block(each, [0]) for each in request.block_hashes]
        hits = len(list(itertools.takewhile(bool, cached)))
        lost += says and request.block_hashes[0] in precious and hits < 7
        precious.update(request.block_hashes[:1] if says else [])
        blocks = start(connector, pool, request, hits)
        connector.build_connector_meta(STEP)
        now += 0.3
        sidecar.hears(late_s)
        finish(connector, pool, request, blocks)
        now += 0.2
    assert not lost


def rules(blocks: int) -> dict[str, Any]:
    """What a caller says whose prompt begins with rules of so many blocks."""
    return {"segments": [{"layer": "rules", "start": 0, "end": blocks * BLOCK_SIZE}]}


class Told(Pool):
    """A pool whose protected keys callers state; time stands where the test puts it."""

    def __init__(self, stale_s: float = 60.0) -> None:
        self.now = 1000.0
        super().__init__(801, clock=self.clock)
        self.protection = ProtectedKeys(len(self.pool.blocks), stale_s, self.clock)
        self.protection.state(self.keys[:40])

    def clock(self) -> float:
        return self.now

    def remains(self, ranking: EvictionRanking | None, linked_since: float) -> int:
        """How many of them are protected still."""
        self.protection.look_through(ranking, linked_since)
        self.protection.evicted_protected = 0
        self.protection.evicted(self.keys)
        return self.protection.evicted_protected


def test_a_callers_word_counts_until_a_ranking_knows_that_the_request_is_over() -> None:
    told = Told()
    told.now += 5.0
    assert told.remains(None, math.inf) == 40
    assert told.remains(ranking(ts=told.now, known_of=1004.0), 990.0) == 40, "it runs"
    told.protection.over(told.keys[:40])
    told.now += 50.0
    assert told.remains(ranking(ts=told.now, known_of=1004.0), 990.0) == 40, "not all is stored"
    told.now += 5.0
    assert told.remains(ranking(ts=told.now, known_of=1006.0), 1001.0) == 40, "linked too late"
    told.now += 2.0
    assert told.remains(ranking(ts=told.now, known_of=1006.0), 990.0) == 0


def test_the_word_of_two_requests_counts_until_the_later_one_is_over() -> None:
    told = Told()
    told.protection.state(told.keys[:20])
    told.protection.over(told.keys[:40])
    told.protection.state(told.keys[:10])
    told.now += 5.0
    assert told.remains(ranking(ts=told.now, known_of=1004.0), 990.0) == 10
    told.protection.over(told.keys[:20])
    told.now += 5.0
    assert told.remains(ranking(ts=told.now, known_of=1004.0), 990.0) == 20, "stored by now, too"
    told.now += 5.0
    assert told.remains(ranking(ts=told.now, known_of=1006.0), 990.0) == 0


def test_a_fresh_ranking_of_a_sidecar_that_is_far_behind_overrules_no_caller() -> None:
    """On a busy machine a sidecar ranks in time, by what it heard half a minute ago."""
    told = Told()
    precious, heard = set(told.keys[:40]), told.now - 1.0
    for is_over in (False, True):
        told.arranger.stated(told.keys[:40], is_over)
    for number in range(30):
        told.now += 1.0
        told.arranger.step(ranking(told.keys, ts=told.now, known_of=heard), linked_since=0.0)
        told.serve(12, number + 5, precious)
    assert told.lost == []


def test_a_word_that_nobody_heard_is_forgotten_in_the_end() -> None:
    told = Told(stale_s=30.0)
    told.protection.over(told.keys[:40])
    told.now += 29.0
    assert told.remains(None, math.inf) == 40
    told.now += 2.0
    assert told.remains(None, math.inf) == 0


def test_callers_cannot_have_more_than_a_sixteenth_of_a_pool_unpriced() -> None:
    """Nobody measures what it costs until a ranking knows of it."""
    told = Told()
    told.protection.state(told.keys)
    assert told.remains(None, math.inf) == 50
    told.protection.evicted_protected = 0
    told.protection.evicted(told.keys[:50])
    assert told.protection.evicted_protected == 50, "no block is of use without those before it"


def test_callers_state_no_more_than_rankings_may_protect() -> None:
    """What a ranking protects counts, too."""
    told = Told()
    for most, kept in [(None, 50), (60, 60), (0, 30)]:
        advice = ranking(protected=told.keys[100:130])
        told.protection.adopt(dataclasses.replace(advice, may_keep=most), 0.0)
        told.protection.state(told.keys[:90])
        assert told.remains(None, math.inf) == kept


def test_what_is_stated_is_kept_before_any_sidecar_answers() -> None:
    pool = new_pool(64)
    connector = connected(pool)
    make, precious = request_maker(), []
    for number in range(40):
        request = make([number, *range(6 * BLOCK_SIZE)])
        request.kv_transfer_params = {"kvgraph": rules(4)} if number < 2 else None
        blocks = start(connector, pool, request)
        connector.build_connector_meta(STEP)
        finish(connector, pool, request, blocks)
        precious += request.block_hashes[:4] if number < 2 else []
    assert all(pool.get_cached_block(each, [0]) for each in precious)


def test_a_block_is_stated_once_however_many_segments_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[list[int]] = []
    monkeypatch.setattr(FreeQueueArranger, "stated", lambda _, keys, over: told.append(keys))
    pool = new_pool(64)
    connector, request = connected(pool), request_maker()(list(range(10 * BLOCK_SIZE)))
    spans = [(130, 5000), (60, 90), *[(16, 140)] * 1000]
    segments = [{"layer": "rules", "start": first, "end": end} for first, end in spans]
    segments.append({"layer": "context", "start": 0, "end": 16})
    request.kv_transfer_params = {"kvgraph": {"segments": segments}}
    finish(connector, pool, request, start(connector, pool, request))
    assert told == [list(map(key_of, request.block_hashes[1:]))] * 2


def test_what_is_freed_between_two_steps_goes_before_protected_blocks() -> None:
    """vLLM frees a request's blocks after a step, and takes blocks before the next one."""
    pool, make = new_pool(25), request_maker()
    connector = connected(pool)

    def begin(number: int, tag: object) -> tuple[Any, list[Any]]:
        request = make([number, *range(8 * BLOCK_SIZE - 1)])
        request.kv_transfer_params = {"kvgraph": tag}
        blocks = start(connector, pool, request)
        connector.build_connector_meta(STEP)
        return request, blocks

    precious = begin(0, rules(8))
    running = begin(1, {})
    finish(connector, pool, *precious)
    others = begin(2, {})
    for number in range(3, 20):  # always one runs, one ends, and one takes what that left
        finish(connector, pool, *running)
        running, others = others, begin(number, {})
    assert all(pool.get_cached_block(each, [0]) for each in precious[0].block_hashes)


def test_few_others_at_the_head_are_not_taken_for_many() -> None:
    """Between one and two steps' worth of them: the next look comes before they are gone."""
    world = Pool(61)
    precious = set(world.keys[:40])
    advice = ranking(protected=world.keys[:40])
    for number in range(30):  # 20 others: what one step may take, and a few
        world.arranger.step(None, advice)
        world.serve(12 if number % 2 else 5, number + 5, precious)
    assert world.lost == []


def test_a_ranking_that_did_not_hear_of_it_does_not_overrule_a_caller() -> None:
    world = Pool(801)
    precious = set(world.keys[:40])
    world.arranger.stated(list(precious), is_over=True)
    for number in range(60):
        world.arranger.step(ranking(order=world.keys), linked_since=math.inf)
        world.serve(12, number + 5, precious)
    assert world.lost == []


def test_what_a_sidecar_protected_outlives_it_for_a_while() -> None:
    """Another one takes its place, which heard of none of these requests."""
    told = Told(stale_s=60.0)
    precious, old = told.keys[40:70], ranking(protected=told.keys[40:70], ts=told.now)
    told.protection.reset()
    told.protection.adopt(old, 900.0)
    told.now += 1.0
    linked = told.now
    again = ranking(protected=precious, ts=linked - 0.5)  # read after the link, made before it
    told.protection.adopt(again, linked)
    told.now += 1.0
    new = ranking(told.keys, ts=told.now, known_of=told.now)
    told.protection.adopt(new, linked)
    told.now += 50.0
    assert told.remains(dataclasses.replace(new, ts=told.now, known_of=told.now), linked) == 30
    told.now += 11.0
    assert told.remains(dataclasses.replace(new, ts=told.now, known_of=told.now), linked) == 0


def test_a_sidecar_that_stays_takes_protection_back_at_once() -> None:
    told = Told()
    told.protection.reset()
    told.protection.adopt(ranking(protected=told.keys[40:70], ts=told.now), 900.0)
    told.now += 1.0
    told.protection.adopt(ranking(told.keys, ts=told.now), 900.0)
    assert told.remains(ranking(ts=told.now), 900.0) == 0


def test_what_is_freed_together_with_its_protected_head_goes_before_it() -> None:
    """A chain is freed from its end: its head stands behind all that was freed with it."""
    world = Pool(41)
    precious, others = world.keys[:28], world.keys[28:]  # fewer than a step can take
    chain = [world.index.find(each) for each in [*precious[:4], *others]]
    advice = ranking(protected=precious)
    world.pool.touch(chain)
    world.arranger.touched(chain)
    world.arranger.step(None, advice)
    world.pool.free_blocks(reversed(chain))
    world.arranger.freed()
    world.take(12, set(precious))
    assert world.lost == []


@pytest.mark.parametrize("displaced_by", ["callers", "a ranking"])
def test_among_none_but_protected_ones_a_word_that_lapses_goes_first(displaced_by: str) -> None:
    world = Pool(41)
    precious, stated = world.keys[:30], world.keys[30:]
    advice = dataclasses.replace(ranking(protected=precious), may_keep=40)
    running = [world.index.find(each) for each in stated]
    world.pool.touch(running)
    world.arranger.stated(stated, False)
    world.arranger.step(None, advice)
    world.pool.free_blocks(running)
    world.arranger.freed()
    world.arranger.step(None, advice)
    if displaced_by == "callers":
        world.arranger.stated(range(1, 11), False)
    else:
        advice = dataclasses.replace(ranking(protected=precious), may_keep=30)
    world.arranger.step(None, advice)
    world.take(10, set(precious))
    assert world.lost == []


def test_a_word_that_counts_again_as_its_request_ends_holds_before_the_next_step() -> None:
    """As where it was forgotten, since rankings protected as much as there was room for."""
    world = Pool(41)
    running = [world.index.find(each) for each in world.keys[3:]]
    world.pool.touch(running)
    world.arranger.step(ranking())
    precious = world.keys[-8:]
    world.arranger.stated(precious, True)
    world.pool.free_blocks(reversed(running))
    world.arranger.freed()
    world.take(16, set(precious))
    assert world.lost == []


HEAD = 7  # protected blocks that open the prompts of one tenant
TENANTS = 3
ROUNDS = 30
MOST_SILENT = 12  # requests between two of tenants, which take turns
SHAPES = {
    "plain": Shape(blocks=81, warm=None),
    "asynchronous": Shape(blocks=81, warm=None, asynchronous=True),
    "tiers": Shape(blocks=81, warm=160),
    "tiers, asynchronous": Shape(blocks=81, warm=160, asynchronous=True),
}


class LateSidecar:
    """A sidecar's graph and planner, late by chance; ``dies``: a new one takes its place."""

    def __init__(
        self, engine: PaperEngine, clock: Callable[[], float], rng: random.Random, dies: bool
    ) -> None:
        self._side, self._clock, self._rng, self._dies = engine.side, clock, rng, dies
        self._client = self._side.client
        self._hears_after = self._says_after = 0.0
        self._next = self._alive_until = clock()
        self._link()

    def turn(self) -> None:
        now = self._clock()
        self._say(now)
        if now < self._next:
            return
        self._next = now + 0.1
        if self._rng.random() < 0.02:
            self._hears_after = self._rng.choice([0, 0, 1, 5, 15, 40])
            self._says_after = self._rng.choice([0, 0, 0.5, 3, 10])
        elif self._dies and now > self._alive_until and self._rng.random() < 0.003:
            self._link()
        told = [*self._client.outbox.take_all(), *self._side.heartbeat(0)]
        self._unheard.append((now, told))
        while self._unheard and self._unheard[0][0] <= now - self._hears_after:
            self._known_of, events = self._unheard.popleft()
            self._graph.apply("engine", events)
        self._planner.tick()
        after = max(now + self._says_after, self._unsaid[-1][0] if self._unsaid else 0.0)
        known = self._known_of
        made = dataclasses.replace(self._planner.latest["engine"], ts=now, known_of=known)
        self._unsaid.append((after, made, self._planner.orders.latest["engine"].keys))

    def _link(self) -> None:
        """A new sidecar greets the engine; it lives for as long as callers' words outlive it."""
        self._graph = KVCacheGraph(rules=Rules(protected_share=0.5), clock=self._clock)
        self._planner = GraphEvictionAdvisor(
            self._graph, lambda: {"engine": 0}, interval_s=0.5, max_ranked=4096,
            prefetch=PrefetchConfig(), clock=self._clock,
        )  # fmt: skip
        self._unheard: deque[tuple[float, list[Any]]] = deque()
        self._unsaid: deque[tuple[float, Any, Any]] = deque()
        self._client.outbox.take_all()
        self._client.outbox.open(1 << 20)
        listed = [self._side.hello(), BlocksResident(self._side.resident()), *self._side.copies()]
        self._graph.apply("engine", listed)
        self._client.linked_since = self._known_of = self._clock()
        self._alive_until = self._clock() + 5.0

    def _say(self, now: float) -> None:
        while self._unsaid and self._unsaid[0][0] <= now:
            _, made, wanted = self._unsaid.popleft()
            ts = max(made.ts, now - 0.3 * self._rng.random())  # messages look younger than they are
            self._client.hold_ranking(dataclasses.replace(made, ts=ts))
            self._client.hold_wanted(wanted)


class Watched:
    """The engine's pool: what it gives away while other blocks are free."""

    def __init__(self, engine: PaperEngine) -> None:
        self.protected: set[int] = set()
        self.needless = self.taken = 0
        self._pool, self._take = engine.pool, engine.pool.get_new_blocks
        engine.pool.get_new_blocks = self._taken

    def _taken(self, count: int) -> Any:
        free = self._pool.free_block_queue.get_all_free_blocks()
        marks = [key(each) in self.protected for each in free]
        self.needless += min(sum(marks[:count]), sum(not each for each in marks[count:]))
        self.taken += count
        return self._take(count)


def prompts(rng: random.Random) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Now and then a tenant's, behind its rules; mostly text that rarely comes again.

    No tenant is silent for as long as callers' words outlive a sidecar that heard them: a new one
    knows nothing of its rules until it asks.
    """
    earlier: list[list[int]] = []
    silent = tenant = 0
    for number in range(6 * ROUNDS):
        silent += 1
        if rng.random() < 0.15 or number < 6 or silent > MOST_SILENT:
            silent, tenant = 0, (tenant + 1) % TENANTS
            head = [3 + tenant, *range(10, 9 + HEAD * BLOCK_SIZE)]
            yield head + [rng.randrange(10, 180) for _ in range(rng.randrange(10, 75))], rules(HEAD)
        elif earlier and rng.random() < 0.3:
            yield rng.choice(earlier[-12:]), {}
        else:
            earlier.append([rng.randrange(10, 180) for _ in range(rng.randrange(50, 200))])
            yield earlier[-1], {}


def played(config: Any, shape: Shape, seed: int, dies: bool) -> Watched:
    """An engine that serves the workload beside such a sidecar; time is what the seed makes it."""
    rng, now = random.Random(seed), 1000.0
    engine = PaperEngine(config, shape, random.Random(seed), clock=lambda: now)
    watch, sidecar = Watched(engine), LateSidecar(engine, lambda: now, rng, dies)
    asked = prompts(rng)
    for _ in range(ROUNDS):
        for tokens, tag in [next(asked) for _ in range(6)]:
            request = engine.ask(tokens, rng.randrange(1, 20))
            request.kv_transfer_params = {"kvgraph": tag}
            if tag:
                watch.protected.update(map(key_of, request.block_hashes[:HEAD]))
        while engine.scheduler.has_requests() or engine.batches:
            engine.step()
            if rng.random() < 0.7:
                engine.finish_copies()
            now += rng.choice([0.005, 0.02, 0.1, 0.4])
            sidecar.turn()
        now += rng.choice([0, 0.1, 1.0, 3.0])
    assert engine.side is not None, "it was disabled"
    return watch


@pytest.mark.parametrize("runs", small_or_large(1, 6))
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_protected_block_is_lost_to_a_late_sidecar(
    paper_config: Any, shape: Shape, dies: bool, runs: int
) -> None:
    pools = [played(paper_config, shape, seed, dies) for seed in range(100, 100 + runs)]
    assert sum(pool.taken for pool in pools) > runs * 5 * shape.blocks, "too little was asked of it"
    assert [pool.needless for pool in pools] == [0] * runs
