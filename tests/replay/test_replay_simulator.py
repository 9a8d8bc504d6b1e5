"""The simulator against plain models: LRU, Belady, libcachesim, reference counts, tiers."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from budgets import small_or_large
from kvgraph.advisor.replay.arms import (
    Settings,
    arm_names,
    chosen_arms,
    new_order,
    order_names,
    run_arm,
)
from kvgraph.advisor.replay.fast import (
    ALGORITHMS,
    belady_hits,
    infinite_hits,
    library_hits,
    lru_hits,
    new_cache,
)
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.simulator import (
    EvictionOrder,
    HostTier,
    Instance,
    Load,
    LruOrder,
    Outcome,
    PrefixAffinity,
    RoundRobin,
    simulate,
)
from kvgraph.advisor.replay.trace import ReplayError, ServiceModel, Trace
from kvgraph.graph.logs.history import History
from made_trace import SEED, chat_trace, make_trace


def plain_lru(trace: Trace, capacity: int) -> list[int]:
    """vLLM's free queue in the words of its source, one block at a time."""
    queue: OrderedDict[int, None] = OrderedDict((-1 - i, None) for i in range(capacity))  # blank
    hits = []
    for chain in trace.chains():
        if len(chain) > capacity:
            hits.append(0)
            continue
        hit = 0
        while hit < len(chain) and chain[hit] in queue:
            hit += 1
        for block in chain[:hit]:
            del queue[block]
        for _ in chain[hit:]:
            queue.popitem(last=False)
        for block in reversed(chain):
            queue[block] = None
        hits.append(hit)
    return hits


@pytest.mark.parametrize("capacity", [30, 100, 400, 5000])
def test_lru_is_vllms_free_queue(capacity: int) -> None:
    trace = chat_trace()
    plain = plain_lru(trace, capacity)
    assert lru_hits(trace, capacity).tolist() == plain
    assert simulate(trace, [Instance(capacity, LruOrder())]).hits.tolist() == plain


@pytest.mark.large
def test_every_arm_lies_between_nothing_and_its_bound() -> None:
    trace = chat_trace()
    best = infinite_hits(trace)
    for capacity in (50, 300):
        bound = int(belady_hits(trace, capacity).sum())
        for arm in arm_names():
            hits = run_arm(arm, trace, capacity, Settings())
            assert (hits >= 0).all(), arm
            assert (hits <= best).all(), arm
            if not arm.startswith("infinite"):
                assert hits.sum() <= bound, arm
    assert (run_arm("belady", trace, 10**6, Settings()) == best).all()
    assert (run_arm("classic", trace, 10**6, Settings()) == best).all()


def test_belady_is_the_best_there_is_on_a_trace_small_enough_to_try_everything() -> None:
    chains = [[0], [1], [2], [0], [3], [1], [0], [2]]
    # By hand, three places: keep 0 and 1, then 0 and 2; hits at requests 3, 5, 6 and 7.
    assert belady_hits(make_trace(chains), 3).tolist() == [0, 0, 0, 1, 0, 1, 1, 1]
    assert belady_hits(make_trace(chains), 1).tolist() == [0, 0, 0, 1, 0, 0, 1, 0]


def test_an_unknown_arm_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ReplayError, match=r"'lruu': allowed: all, lru, "):
        chosen_arms(["lruu"])


# libcachesim ------------------------------------------------------------------------------------


def prefix_free(requests: int) -> Trace:
    rng = random.Random(SEED)
    blocks = [min(199, int(rng.paretovariate(0.7))) for _ in range(requests)]
    return make_trace([[block] for block in blocks])


@pytest.mark.parametrize("policy", ALGORITHMS)
@pytest.mark.parametrize("capacity", [10, 50])
def test_adapters_equal_libcachesim_without_prefixes(policy: str, capacity: int) -> None:
    trace = prefix_free(4000)
    cache, request = new_cache(policy, capacity)
    plain = []
    for [block] in trace.chains():
        request.obj_id = block
        plain.append(int(cache.get(request)))
    adapted = library_hits(trace, capacity, policy)
    if policy == "lecar":  # draws lots, from a generator that cannot be seeded
        assert adapted.sum() == pytest.approx(sum(plain), rel=0.05)
    else:
        assert adapted.tolist() == plain


@pytest.mark.parametrize(("policy", "least"), [("s3fifo", 10), ("wtinylfu", 6)])
def test_a_pool_too_small_for_an_algorithm_is_refused(policy: str, least: int) -> None:
    library_hits(prefix_free(100), least, policy)
    with pytest.raises(ReplayError, match=f"allowed: {least} or more"):  # the library would abort
        new_cache(policy, least - 1)


def test_libcachesim_algorithms_differ_from_each_other_and_from_lru() -> None:
    trace = prefix_free(4000)
    rates = {policy: tuple(library_hits(trace, 20, policy).tolist()) for policy in ALGORITHMS}
    assert len(set(rates.values())) == len(ALGORITHMS)
    assert tuple(lru_hits(trace, 20).tolist()) not in rates.values()
    assert all(map(sum, rates.values())), "one finds nothing"


# Time, room and tiers ---------------------------------------------------------------------------


def test_blocks_of_running_requests_are_never_evicted_and_others_wait() -> None:
    trace = make_trace([[0, 1, 2], [3, 4, 5], [0, 1, 2]], at=[0.0, 0.1, 0.2], output=0)
    slow = Load(ServiceModel(prefill_tokens_per_s=16.0))  # a block a second
    outcome = simulate(trace, [Instance(4, LruOrder())], load=slow)
    assert outcome.waited[1] == pytest.approx(2.9)  # until the first is done, at 3.0
    assert outcome.waited[2] == pytest.approx(5.8)  # first come, first served
    assert outcome.hits.tolist() == [0, 0, 0 + 1]  # four places: one of the first's survives


def test_a_shared_block_has_two_users() -> None:
    trace = make_trace([[0, 1], [0, 2], [3, 4]], at=[0.0, 0.1, 0.2])
    outcome = simulate(
        trace, [Instance(6, LruOrder())], load=Load(ServiceModel(prefill_tokens_per_s=1.0))
    )
    assert outcome.hits.tolist() == [0, 1, 0]
    instance = Instance(6, LruOrder())
    instance.admit(0, [0, 1], 2, 1, 0.0)
    instance.admit(1, [0, 2], 2, 0, 0.0)
    assert (instance.used, instance.blank, instance.cached) == (4, 2, 3)
    instance.finish(0, [0, 1], 1.0)
    assert instance.used == 2
    instance.finish(1, [0, 2], 2.0)
    assert (instance.used, instance.blank, instance.cached) == (0, 3, 3)


def test_concurrency_is_bounded() -> None:
    trace = make_trace([[0], [1], [2]], at=[0.0, 0.0, 0.0], output=0)
    load = Load(ServiceModel(prefill_tokens_per_s=16.0), max_running=1)
    assert simulate(trace, [Instance(9, LruOrder())], load=load).waited.tolist() == [0.0, 1.0, 2.0]


def test_requests_take_what_was_recorded_where_that_is_known(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_text(
        '{"kvgraph_trace": 1, "block_size": 16}\n'
        '{"at": 0.0, "seconds": 5.0, "input_length": 16, "output_length": 1, "hash_ids": [1]}\n'
        '{"at": 0.1, "input_length": 16, "output_length": 0, "hash_ids": [2]}\n'
        '{"at": 0.2, "input_length": 16, "output_length": 0, "hash_ids": [3]}\n'
    )
    load = Load(ServiceModel(prefill_tokens_per_s=16.0), max_running=1, as_recorded=True)
    waited = simulate(load_trace(path), [Instance(9, LruOrder())], load=load).waited
    assert waited.tolist() == [0.0, pytest.approx(4.9), pytest.approx(5.8)]


def test_a_host_tier_gives_back_what_was_evicted() -> None:
    trace = make_trace([[0, 1, 2], [3, 4, 5], [0, 1, 2]])
    pool = Instance(3, LruOrder(), host=HostTier(100))
    outcome = simulate(trace, [pool])
    assert outcome.hits.tolist() == [0, 0, 0]
    assert outcome.warmed.tolist() == [0, 0, 3]
    small = simulate(trace, [Instance(3, LruOrder(), host=HostTier(2))])
    # The head was evicted last and is still there; the tail made room for it.
    assert small.warmed.tolist() == [0, 0, 2]


def test_routers_keep_sessions_together_or_apart() -> None:
    trace, found = chat_trace(400), []
    for router in (RoundRobin(), PrefixAffinity(trace)):
        pools = [Instance(400, LruOrder()) for _ in range(4)]
        found.append(simulate(trace, pools, router=router).hits.sum())
    assert found[0] < found[1]


# The live policy in the lab ---------------------------------------------------------------------


def test_hints_are_worth_something_when_a_session_is_over() -> None:
    trace = chat_trace(800)
    told = run_arm("classic+hints", trace, 150, Settings()).sum()
    assert told > run_arm("classic", trace, 150, Settings()).sum()


def test_a_trace_head_knows_nothing_of_the_rest() -> None:
    trace = chat_trace(200)
    head = trace.head(0.5)
    assert len(head) == 100
    assert all(a <= b for a, b in pairwise(head.at.tolist()))
    assert head.last.sum() == len(set(head.session.tolist()))
    assert lru_hits(head, 80).tolist() == lru_hits(trace, 80)[:100].tolist()


def agents_trace(users: int, turns: int, seed: int) -> Trace:
    """Users who work in parallel: contexts grow, are compacted at times, and pauses vary widely."""
    rng, fresh = random.Random(seed), iter(range(10_000_000))
    contexts = [[next(fresh) for _ in range(rng.randrange(20, 60))] for _ in range(users)]
    events = []
    for user in range(users):
        at = 0.0
        for _ in range(turns):
            at += rng.lognormvariate(2.5, 1.5)
            events.append((at, user))
    chains, times = [], []
    for at, user in sorted(events):
        context = contexts[user]
        if len(context) > 150:
            del context[20:]
        context += [next(fresh) for _ in range(rng.randrange(1, 8))]
        chains.append(list(context))
        times.append(at)
    return make_trace(chains, times)


@pytest.mark.parametrize("host", [250, 500, 1000, 2000])
def test_tiers_compute_less_than_a_plain_host_tier_of_equal_bytes(host: int) -> None:
    """Whatever is known of the traffic: by not keeping twice what the pool holds."""
    trace = agents_trace(users=24, turns=60, seed=5)
    computed = {}
    for plain in (True, False):
        tier = HostTier(host, plain=plain)
        found = simulate(trace, [Instance(1000, LruOrder(), host=tier)])
        computed[plain] = int(trace.matchable.sum() - found.hits.sum() - found.warmed.sum())
    assert computed[False] < computed[True]


SMALL, LARGE = 30, 120
IN_TIME = Load(ServiceModel(prefill_tokens_per_s=200.0), max_running=4)


class Watched(EvictionOrder):
    """An order, and an engine that checks each of its answers, each time that something was to
    go.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._free: set[int] = set()
        self._used: dict[int, int] = {}
        self._capacity = 0
        self.asked = 0

    def serves(self, capacity: int, copies: int = 0) -> None:
        self._capacity = capacity
        self._order.serves(capacity, copies)

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        self._free |= set(blocks)
        self._order.freed(request, blocks, now)

    def reused(self, blocks: Sequence[int]) -> None:
        assert self._free >= set(blocks)
        self._free -= set(blocks)
        self._order.reused(blocks)

    def victims(self, count: int, now: float) -> list[int]:
        free, victims = set(self._free), self._order.victims(count, now)
        self.asked += 1
        assert len(victims) == len(set(victims)) == count, "as many as are wanted, none twice"
        assert free >= set(victims), "what is in use, or gone already, is nobody's to take"
        self._free -= set(victims)
        return victims

    def started(self, request: int, hit: int, new: Sequence[int], now: float) -> None:
        self._used.update(dict.fromkeys(new, request))
        self._order.started(request, hit, new, now)

    def evicted(self, blocks: Sequence[int], now: float) -> None:
        for block in blocks:
            del self._used[block]
        assert len(self._used) <= self._capacity
        self._order.evicted(blocks, now)

    def copied(self, made: Sequence[int], gone: Sequence[int], now: float) -> None:
        self._order.copied(made, gone, now)

    def finished(self, request: int, now: float) -> None:
        self._order.finished(request, now)


@pytest.fixture(params=order_names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def chats() -> Trace:
    return chat_trace(150, seed=5)


def watched(name: str, trace: Trace) -> Watched:
    return Watched(new_order(name, trace, Settings()))


def replayed(name: str, trace: Trace, capacity: int, load: Load | None = None) -> Outcome:
    order = watched(name, trace)
    instance = Instance(capacity, order)
    outcome = simulate(trace, [instance], load=load)
    assert order.asked > 0, "else nothing was shown"
    assert instance.cached <= capacity
    assert instance.running == 0
    return outcome


@pytest.mark.parametrize("capacity", small_or_large(SMALL, LARGE))
def test_the_same_requests_find_the_same(name: str, chats: Trace, capacity: int) -> None:
    once, again = (replayed(name, chats, capacity, IN_TIME) for _ in range(2))
    assert once.hits.tolist() == again.hits.tolist()
    assert once.waited.tolist() == again.waited.tolist()


def test_where_there_is_room_for_all_nothing_is_lost(name: str, chats: Trace) -> None:
    order = watched(name, chats)
    outcome = simulate(chats, [Instance(chats.num_blocks + 1, order)])
    assert outcome.hits.tolist() == infinite_hits(chats).tolist()
    assert order.asked == 0


@pytest.mark.parametrize("capacity", [SMALL, LARGE])
def test_nobody_finds_more_than_belady(name: str, chats: Trace, capacity: int) -> None:
    outcome = replayed(name, chats, capacity)
    assert outcome.refused == 0, "what is refused never comes, though a trace's future has it"
    found = outcome.hits
    assert 0 < found.sum() <= found_by_belady(chats, capacity)
    assert found.sum() <= belady_hits(chats, capacity).sum()
    assert (found <= infinite_hits(chats)).all()


@cache
def found_by_belady(trace: Trace, capacity: int) -> int:
    """What an order finds that knows the future, in a pool as all have it."""
    return int(replayed("belady-pool", trace, capacity).hits.sum())


def test_a_pool_of_one_block_serves_what_fits(name: str) -> None:
    trace = make_trace([[0], [0], [1, 2], [1], [0], [1], [1]])
    outcome = replayed(name, trace, 1)
    assert outcome.hits.tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert outcome.refused == 1, "two blocks at once"


def test_copies_below_change_no_promise(name: str, chats: Trace) -> None:
    order = watched(name, chats)
    simulate(chats, [Instance(SMALL, order, host=HostTier(2 * SMALL, plain=False))])
    assert order.asked > 0


def test_nothing_is_asked_of_it_before_anything_came(name: str, chats: Trace) -> None:
    order = watched(name, chats)
    order.serves(SMALL)
    assert order.victims(0, 0.0) == []


@pytest.mark.parametrize("other", [name for name in order_names() if name.startswith("lru")])
def test_all_that_are_called_lru_are_lru(other: str, chats: Trace) -> None:
    plain = replayed("lru", chats, SMALL).hits
    assert replayed(other, chats, SMALL).hits.tolist() == plain.tolist()


def test_a_graph_without_logs_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = chat_trace(300)
    without = run_arm("default", trace, SMALL, Settings()).tolist()
    monkeypatch.setattr("kvgraph.graph.logs.history.NoHistory", History)
    assert run_arm("default", trace, SMALL, Settings()).tolist() == without
    assert sum(without) > 0
