"""The guard: LRU rules until the policy proves itself, and again where it finds less."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from kvgraph.advisor.config.sections import PolicyConfig
from kvgraph.advisor.policies.evidence import PolicySelector
from kvgraph.advisor.policies.guard import Guard, PoolAndCopies
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.advisor.policies.shadow import RankedShadow
from kvgraph.advisor.replay.graph_order import GraphOrder, SimulatedSidecar
from kvgraph.advisor.replay.simulator import (
    EvictionOrder,
    HostTier,
    Instance,
    LruOrder,
    simulate,
)
from kvgraph.advisor.replay.trace import Trace
from kvgraph.graph.compiled import core
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.copies import worth_spilling
from kvgraph.graph.ranking.order import is_under_lru
from kvgraph.graph.ranking.policy import Scores, Terms, View
from kvgraph.graph.tables.blocks import DEPTH_TIE, Selection
from kvgraph.graph.tables.protection import ProtectionBudget
from kvgraph.graph.tables.walks import Walk
from kvgraph.graph.types import NO_ROW, Keys, Rows
from kvgraph.graph.wire.events import BlocksCleared, EngineHello, TierReport
from made_traffic import Maker, Request, agents, made, recent
from turns import SIZE, dropped, resident, spilled, turn_events


class Fixed:
    """A policy whose scores are made of the seconds since each block was used."""

    name = "fixed"

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._rng = np.random.default_rng(5)

    def observe(self, view: View) -> None:
        """Nothing to learn."""

    def scores(self, view: View, picked: Selection) -> Scores:
        match self._kind:
            case "last used first":
                return np.asarray(picked.last_used() - view.now)
            case "constant":
                return np.zeros(len(picked))
            case "nan":
                return np.full(len(picked), np.nan)
            case _:
                return self._rng.random(len(picked))

    def terms(self, view: View, picked: Selection) -> Terms:
        return {}


def numbered(first: int, count: int) -> tuple[Rows, Keys]:
    """Rows that follow each other, and their blocks' keys."""
    rows = np.arange(first, first + count, dtype=np.int32)
    return rows, rows.astype(np.uint64)


def chains(seed: int, capacity: int) -> Iterator[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    for _ in range(3000):
        first = int(rng.integers(0, 30)) * 40
        count = int(rng.integers(1, min(40, capacity)))
        yield np.arange(first, first + count, dtype=np.int32)


@pytest.mark.parametrize("capacity", [50, 300, 1_000])
def test_a_shadow_holds_what_an_lru_pool_holds(capacity: int) -> None:
    """Both kinds: a ranked one without a ranking evicts as the engine does, while it is small."""
    shadows: list[Any] = [core.LruStack([capacity])]
    if capacity < 512:
        shadows.append(RankedShadow(capacity))
    pool: OrderedDict[int, None] = OrderedDict()
    anywhere = np.random.default_rng(3).permutation(1 << 20).astype(np.int32)
    for chain in chains(1, capacity):
        rows = chain if capacity < 512 else anywhere[chain]
        keys = rows.astype(np.uint64) + np.uint64(7)
        wanted = rows.tolist()
        found = next((i for i, row in enumerate(wanted) if row not in pool), len(wanted))
        for shadow in shadows:
            assert shadow.found(rows, keys) in (found, [found])
            shadow.use(rows, keys)
        for row in reversed(wanted):
            pool[row] = None
            pool.move_to_end(row)
        while len(pool) > capacity:
            pool.popitem(last=False)


@pytest.mark.parametrize("capacity", [50, 300])
def test_shadows_follow_walks_as_they_do_one_by_one(capacity: int) -> None:
    shadows = core.LruStack([capacity]), RankedShadow(capacity)
    alone = core.LruStack([capacity]), RankedShadow(capacity)
    for each in (shadows[1], alone[1]):
        each.adopt(np.arange(0, 1_200, 40, dtype=np.int32), np.arange(30.0), np.full(30, 40))
    keys = np.arange(1_300, dtype=np.uint64) + np.uint64(7)
    walks = [
        Walk(rows, 0, -1) if number % 3 == 2 else Walk(rows, len(rows) - number % 2, 0)
        for number, rows in enumerate(chains(2, capacity))
    ]
    for start in range(0, len(walks), 100):
        some = walks[start : start + 100]
        told = [each.follow(some, keys) for each in shadows]
        for each, counts in zip(alone, told, strict=True):
            for walk, count in zip(some, counts, strict=True):
                reached = walk.rows[: walk.reach]
                found = each.found(reached, keys[reached])
                assert count == (np.ravel(found)[0] if walk.found >= 0 else -1)
                each.use(walk.rows, keys[walk.rows])
    with pytest.raises(TypeError, match="a row is none of the table's"):
        shadows[0].follow([Walk(np.array([1_300], dtype=np.int32), 0, -1)], keys)


@pytest.mark.parametrize("shadow", [core.LruStack([10]), RankedShadow(10)], ids=["lru", "ranked"])
def test_a_row_that_was_reused_is_another_block(shadow: Any) -> None:
    rows, keys = numbered(0, 4)
    shadow.use(rows, keys)
    assert np.ravel(shadow.found(rows, keys)) == 4
    assert np.ravel(shadow.found(rows, keys + np.uint64(100))) == 0


def test_a_ranked_shadow_spares_what_was_used_since() -> None:
    ranked, first, second = RankedShadow(6), numbered(0, 3), numbered(3, 3)
    for chain in (first, second):
        ranked.use(*chain)
    ranked.adopt(numbered(0, 6)[0], np.zeros(6))
    ranked.use(*first)
    ranked.use(*numbered(6, 2))
    assert ranked.found(*first) == 3
    assert ranked.rows(np.arange(8, dtype=np.uint64)).tolist() == [0, 1, 2, 5, 6, 7]


@pytest.mark.parametrize("capacities", [[50], [300, 40, 600]])
def test_a_stack_holds_what_pools_of_every_size_hold(capacities: list[int]) -> None:
    stack = core.LruStack(capacities)
    pools = [core.LruStack([capacity]) for capacity in capacities]
    for rows in chains(2, 50):
        keys = rows.astype(np.uint64) + np.uint64(7)
        assert stack.found(rows, keys) == [pool.found(rows, keys)[0] for pool in pools]
        for each in (stack, *pools):
            each.use(rows, keys)


class Plain:
    """A pool of sets and lists that evicts as ``RankedShadow`` does."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[int, int] = {}  # row → its last use
        self.uses = self.as_of = 0
        self.order: list[int] = []

    def adopt(self, rows: list[int], scores: list[float]) -> None:
        ranked = sorted(zip(rows, scores, strict=True), key=lambda each: -each[1])
        self.order, self.as_of = [row for row, _ in ranked], self.uses

    def use(self, rows: list[int]) -> None:
        """Use a chain, and evict."""
        for row in reversed(rows):
            self.uses += 1
            self.held[row] = self.uses
        while len(self.held) > self.capacity:
            named = (r for r in self.order if self.held.get(r, self.as_of + 1) <= self.as_of)
            oldest = min(self.held, key=lambda row: self.held[row])
            del self.held[next(named, oldest)]


@pytest.mark.parametrize("ties", [False, True])
def test_a_ranked_shadow_evicts_as_a_plain_pool_does(ties: bool) -> None:
    """By the ranking as long as there is some of it left, and of equals the first."""
    rng = np.random.default_rng(3)
    shadow, plain = RankedShadow(300), Plain(300)
    for number, rows in enumerate(chains(3, 40)):
        if number % 50 == 10:
            held = np.array(sorted(plain.held), dtype=np.int32)
            scores = rng.integers(0, 5, len(held)).astype(float) if ties else rng.random(len(held))
            shadow.adopt(held, scores)
            plain.adopt(held.tolist(), scores.tolist())
        keys = rows.astype(np.uint64)
        shadow.use(rows, keys)
        plain.use(rows.tolist())
        assert shadow.rows(np.arange(2_000, dtype=np.uint64)).tolist() == sorted(plain.held)
        if number > 600:
            break


def test_pools_that_share_their_uses_hold_what_each_alone_would() -> None:
    rng, uses = np.random.default_rng(5), core.RankedPools()
    rest = np.arange(2_000, dtype=np.uint64)
    shared = [RankedShadow(capacity, uses) for capacity in (300, 40, 500)]
    alone = [RankedShadow(each.capacity) for each in shared]
    for number, rows in enumerate(chains(6, 40)):
        keys = rows.astype(np.uint64)
        there = uses.found(rows, keys)
        assert [there[each.number] for each in shared] == [each.found(rows, keys) for each in alone]
        for each in (uses, *alone):
            each.use(rows, keys)
        if number % 50 == 10:
            for one, other in zip(shared, alone, strict=True):
                held = one.rows(rest)
                scores = rng.random(len(held))
                one.adopt(held, scores)
                other.adopt(held, scores)
        if number == 300:  # one begins anew, with blocks that the others may not hold
            begun = np.arange(0, 2_000, 7, dtype=np.int32)
            for each in (shared[2], alone[2]):
                each.restart(begun, rest[begun])
        for one, other in zip(shared, alone, strict=True):
            if number < 300:
                assert one.rows(rest).tolist() == other.rows(rest).tolist()
            assert len(one.rows(rest)) == one.held <= one.capacity
        if number > 600:
            break


def test_a_large_pool_makes_room_ahead_and_never_holds_more_than_it_may() -> None:
    pool, held = RankedShadow(5_000), set[int]()
    for first in range(0, 40_000, 13):
        pool.use(*numbered(first, 13))
        if first > 6_000:
            held.add(pool.held)
    assert min(held) >= 5_000 - 5_000 // 512 - 13
    assert max(held) <= 5_000


@pytest.mark.parametrize("spread", [1e-5, 1.0, 1e12])
def test_runs_are_evicted_as_their_blocks_are(spread: float) -> None:
    """Each block of a run scores a tie of depth more than the one before it; runs of near scores
    lie among each other.
    """
    rng, keys = np.random.default_rng(7), np.arange(9_000, dtype=np.uint64)
    lengths = rng.integers(1, 30, 250)
    firsts = np.cumsum(lengths + rng.integers(0, 3, 250)) - lengths
    scores = spread * rng.integers(-20, 20, 250).astype(float)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = (np.repeat(firsts, lengths) + within).astype(np.int32)
    by_run, by_block = RankedShadow(len(rows)), RankedShadow(len(rows))
    for pool in (by_run, by_block):
        pool.use(rows, keys[rows])
    by_run.adopt(firsts.astype(np.int32), scores, lengths)
    by_block.adopt(rows, np.repeat(scores, lengths) + within * DEPTH_TIE)
    for start in range(int(rows[-1]) + 1, 9_000, 7):
        for pool in (by_run, by_block):
            pool.use(*numbered(start, min(7, 9_000 - start)))
        assert by_run.rows(keys).tolist() == by_block.rows(keys).tolist()


@pytest.mark.parametrize("distinct", [3, 10**6])
def test_a_large_ranking_is_followed_in_its_order(distinct: int) -> None:
    """It is sorted in parts, as somebody asks: of equals the first goes first, all the same."""
    rng, keys = np.random.default_rng(4), np.arange(120_000, dtype=np.uint64)
    rows = np.sort(rng.permutation(60_000)[:40_000]).astype(np.int32)
    scores = rng.integers(0, distinct, len(rows)).astype(float)
    scores[::7] = -np.inf
    pool = RankedShadow(len(rows))
    pool.use(rows, keys[rows])
    pool.adopt(rows, scores)
    in_order = rows[np.argsort(-scores, kind="stable")]
    for start in range(60_000, 90_000, 1_500):
        pool.use(*numbered(start, 1_500))
        held = pool.rows(keys)
        old = held[held < 60_000]
        assert old.tolist() == sorted(in_order[len(rows) - len(old) :].tolist())


def test_what_shadows_remember_is_bounded_by_their_pools() -> None:
    """Neither many requests for few blocks, nor many blocks, nor high rows take room for ever."""
    stack, uses = core.LruStack([2_000, 1_000]), core.RankedPools()
    pool = RankedShadow(1_000, uses)
    for _ in range(200):
        stack.use(*numbered(0, 500))
    few_nbytes = stack.nbytes()
    for first in range(0, 2_000_000, 500):
        for each in (stack, uses):
            each.use(*numbered(first, 500))
    assert few_nbytes < 50_000
    assert stack.nbytes() < 2_000_000
    assert uses.nbytes() < 3_000_000
    assert stack.found(*numbered(first, 500)) == [500, 500]
    assert pool.held <= 1_000


def found(trace: Trace, orders: list[EvictionOrder]) -> float:
    engines = [Instance(400, order) for order in orders]
    home = trace.session % len(engines)
    hits = simulate(trace, engines, router=lambda request, _: int(home[request])).hits
    return float(hits.sum()) / trace.prompt_blocks


@pytest.mark.parametrize(
    ("engines", "maker", "kind"),
    [
        (1, agents, "constant"), (1, recent, "random"), (1, agents, "nan"),
        (1, recent, "last used first"),
        *((4, maker, kind) for maker in (agents, recent) for kind in ("random", "last used first")),
        *(
            pytest.param(1, maker, kind, marks=pytest.mark.large)
            for maker, kind in [
                (recent, "constant"), (agents, "random"), (recent, "nan"),
                (agents, "last used first"),
            ]
        ),
    ],
)  # fmt: skip
def test_nonsense_costs_next_to_nothing(
    tmp_path: Path, engines: int, maker: Maker, kind: str
) -> None:
    trace = made(tmp_path, maker(np.random.default_rng(4)))
    sidecar = SimulatedSidecar(trace, Fixed(kind))
    advised = found(trace, [GraphOrder(sidecar) for _ in range(engines)])
    assert advised >= found(trace, [LruOrder() for _ in range(engines)]) - 0.005


class Fleet:
    """Engines with pools of 40 blocks and one sidecar. The policy lets go first what was used
    last: what a loop over too many contexts wants.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.guard = Guard("fixed")
        policy = Fixed("last used first")
        self.graph = KVCacheGraph(policy=policy, referee=self.guard, clock=lambda: self.now)

    def join(self, engine: str, model: str = "m", copies: int = 0) -> None:
        memory = [TierReport(4096, 0, copies, *([0] * 20))] if copies else []
        self.graph.apply(engine, [EngineHello(engine, model, SIZE, 41, "v"), *memory])
        self.graph.rank(engine, 100)

    def ask(self, contexts: int, rounds: int, engine: str = "e", hits: int = 0) -> list[int]:
        """So many contexts of ten blocks in turn, of five of which LRU finds nothing, and of three
        all; returns the last ranking.
        """
        for number in [*range(contexts)] * rounds:
            self.now += 1.0
            keys = range(1000 * (number + 1), 1000 * (number + 1) + 10)
            turn = turn_events(None, *keys, found=hits, more=1, request=f"r{self.now}")
            self.graph.apply(engine, turn)
            order = self.graph.rank(engine, 100).order.tolist()
        return order

    def is_ranked(self, engine: str) -> bool:
        return self.graph.ruling(engine).policy_rules


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.join("e")
    return fleet


@pytest.fixture
def proven(fleet: Fleet) -> Fleet:
    """The policy has shown on ``e`` that it finds more."""
    fleet.ask(5, 20)
    assert fleet.is_ranked("e")
    return fleet


def test_a_policy_rules_once_it_finds_more(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvgraph")
    assert fleet.ask(5, 1) == [], "nobody has shown anything yet: the engine's own order"
    assert fleet.ask(5, 20), "the policy ranks"
    assert fleet.guard.policy_choices()[0].policy_rules
    assert "fixed ranks from now on" in caplog.text


def test_lru_takes_over_where_the_policy_finds_less_than_it_would(proven: Fleet) -> None:
    assert proven.ask(3, 40) == []
    assert not proven.guard.trusts(0)
    assert proven.guard.policy_choices()[0].changes == 2


CONTEXTS: Final = [key for first in range(1000, 6000, 1000) for key in range(first, first + 10)]
"""Those of ``Fleet.ask(5, …)``."""


def test_lru_takes_over_where_host_memory_holds_more_under_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvgraph")
    fleet.join("hosted", copies=40)
    fleet.graph.apply("hosted", [spilled(*CONTEXTS)])
    fleet.ask(5, 20, "hosted")
    assert fleet.is_ranked("hosted"), "nothing is lost: there is a copy of all"
    fleet.graph.apply("hosted", [dropped(*CONTEXTS)])
    fleet.ask(5, 20, "hosted")
    assert not fleet.is_ranked("hosted")
    assert "LRU ranks from now on; it finds more in pool and host memory together" in caplog.text
    fleet.ask(9, 60, "hosted")
    assert fleet.is_ranked("hosted"), "of 90 blocks LRU finds none: the policy may try again"


@pytest.mark.parametrize("copied", [0, 10])
def test_lru_is_not_credited_with_what_is_not_copied_in_time(copied: int) -> None:
    both, keys = PoolAndCopies(80), np.arange(100, dtype=np.uint64)
    rows = np.arange(10, dtype=np.int32)
    both.follow([Walk(rows, 10, 0, copied)] * 40, [0] * 40, keys, by_policy=False)
    both.follow([Walk(rows, 10, 0)] * 10, [0] * 10, keys, by_policy=True)
    assert both.favour_lru == (copied > 0)


def back_once(rng: np.random.Generator) -> Iterator[Request]:
    """Half return once, soon; the pool gains by keeping them, and by losing them then."""
    for session in range(300):
        at = session * 2.0
        yield at, session, 5 if session % 2 else 10, 50
        if session % 2:
            yield at + 25.0 + float(rng.uniform(0.0, 2.0)), session, 6, 50


@pytest.mark.parametrize(
    ("maker", "has_name"), [(back_once, False), (back_once, True), (agents, True)]
)
def test_host_memory_finds_no_less_than_lru_would_there(
    tmp_path: Path, maker: Maker, has_name: bool
) -> None:
    """Whether callers say nothing, or give all their sessions one name."""
    trace = replace(made(tmp_path, maker(np.random.default_rng(4))), has_sessions=True)
    told = trace
    if has_name:
        none = np.zeros_like(trace.session)
        told = replace(trace, session=none, last=np.zeros_like(trace.last))
    advised = GraphOrder.alone(told, LifecyclePolicy(), hints=has_name)
    lru = computed(trace, LruOrder(), HostTier(64))
    assert computed(told, advised, LiveMemory(64, advised.sidecar)) <= lru + 0.005


class LiveMemory(HostTier):
    """Stores what the sidecar of one engine considers worth a copy, and all while LRU ranks."""

    def __init__(self, capacity: int, sidecar: SimulatedSidecar) -> None:
        super().__init__(capacity, plain=False)
        self._sidecar = sidecar

    def store(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        graph, keys = self._sidecar.graph, self._sidecar.events.keys[list(blocks)]
        if is_under_lru(0, graph.policy, graph.referee):
            return super().store(blocks)
        rows = graph.tables.blocks.find(keys, graph.tables.salt(0))
        worthy = (rows == NO_ROW) | worth_spilling(graph.tables, rows, self._sidecar.now)
        return super().store(list(compress(blocks, worthy.tolist())))


def computed(trace: Trace, order: EvictionOrder, host: HostTier) -> float:
    """The share of the prompts that a pool of as many blocks as the memory has does not find."""
    out = simulate(trace, [Instance(host.capacity, order, host=host)])
    return 1.0 - float(out.hits.sum() + out.warmed.sum()) / trace.prompt_blocks


def test_a_reset_empties_the_shadows_and_keeps_the_ruling(proven: Fleet) -> None:
    proven.graph.apply("e", [BlocksCleared()])
    proven.ask(5, 1)
    assert proven.guard.trusts(0)
    assert proven.guard.policy_choices()[0].ahead == 0.0, "nobody finds anything in an empty pool"


def test_what_a_sidecar_finds_in_a_pool_proves_nothing_while_it_may_be_in_another_order() -> None:
    fleet = Fleet()
    listed = [key for first in (4000, 3000, 2000, 1000) for key in range(first, first + 10)]
    fleet.graph.apply("e", [EngineHello("e", "m", SIZE, 41, "v"), resident(*listed)])
    fleet.graph.rank("e", 100)
    fleet.ask(5, 2)
    assert not fleet.is_ranked("e"), "LRU's shadow has lost what the engine may have kept"
    fleet.ask(5, 1)
    assert fleet.is_ranked("e"), "of what was listed nothing is left"


class Price:
    """Notes what protection may cost."""

    budget = ProtectionBudget(0.0, None, None, None)
    allowed = math.nan

    def follow(self, view: View, walk: Any) -> None: ...

    def rank(self, view: View, scores: Any) -> bool:
        return True

    def settle(self, view: View, allowed: float, by_policy: bool) -> bool:
        self.allowed = allowed
        return False


def test_protection_may_cost_a_50th_of_the_policys_gain_and_under_lru_nothing(fleet: Fleet) -> None:
    price, case = Price(), fleet.guard._cases[0]
    case.price = price  # type: ignore[assignment]
    fleet.ask(5, 1)
    assert (fleet.guard.trusts(0), price.allowed) == (False, 0.0)
    fleet.ask(5, 20, hits=8)  # of ten, where LRU finds none
    assert fleet.guard.trusts(0)
    assert price.allowed == 0.5, "what an operator allows is the bound of it"
    fleet.graph.rules = replace(fleet.graph.rules, protected_price_points=100.0)
    fleet.ask(5, 1, hits=8)
    assert price.allowed == pytest.approx(case.selector.points_ahead / 50)


def test_configuration_may_go_without_a_guard() -> None:
    assert PolicyConfig().referee().yields
    unguarded = PolicyConfig(guard=False).referee()
    assert not unguarded.yields
    assert unguarded.trusts(0), "the policy ranks from the start"
    assert unguarded.policy_choices() == {}
    assert not PolicyConfig(name="lru").referee().yields


@pytest.mark.parametrize(("model", "ranked"), [("m", True), ("another", False)])
def test_an_engine_begins_by_what_the_others_of_its_model_have_shown(
    proven: Fleet, model: str, ranked: bool
) -> None:
    proven.join("new", model)
    assert proven.is_ranked("new") is ranked, "it has shown nothing itself"


def test_what_an_engine_has_shown_goes_with_it(proven: Fleet) -> None:
    proven.graph.forget_engine("e")
    proven.join("new")
    assert not proven.is_ranked("new"), "though it has the other's place"


def test_an_engine_goes_back_to_lru_whatever_the_others_say(proven: Fleet) -> None:
    proven.join("new")
    proven.ask(3, 10, "new")
    assert proven.is_ranked("e")
    assert not proven.is_ranked("new")
    proven.ask(5, 20)
    proven.ask(3, 10, "new")
    assert not proven.is_ranked("new"), "it has decided, and decides for itself from now on"
    proven.graph.apply("new", [BlocksCleared()])
    proven.ask(1, 1, "new")
    assert proven.is_ranked("e")
    assert not proven.is_ranked("new"), "also after a reset"


def selector(ahead: float, spread: float, capacity: int = 100) -> PolicySelector:
    shown = PolicySelector(capacity)
    for evidence in (shown.since, shown.ever):
        evidence.ahead, evidence.spread = ahead, spread
    return shown


def test_evidence_of_several_counts_as_that_of_one_engine_with_all_their_blocks() -> None:
    each = [selector(5.0, 144.0) for _ in range(4)]
    assert not each[0].is_due_for_change(), "one alone is within chance"
    assert selector(7.0, 144.0).is_due_for_change(), "half a standard deviation is enough"
    ranks = selector(-7.0, 144.0)
    ranks.trusted = True
    assert not ranks.is_due_for_change(), "LRU needs a whole one"
    assert each[0].may_begin(each)
    small = [selector(1.5, 1.0) for _ in range(4)]
    assert not small[0].may_begin(small), "2 % of four pools are eight blocks"


def test_one_request_proves_nothing() -> None:
    """Its blocks are a whole standard deviation, however many they are."""
    shown = PolicySelector(100)
    for difference, is_due in [(60, False), (-20, False), (10, False), (15, True)]:
        shown.note(difference, 60)
        assert shown.is_due_for_change() is is_due
        assert shown.may_begin([shown, PolicySelector(100)]) is is_due


def test_an_engine_that_is_sure_of_lru_does_not_follow() -> None:
    others = [selector(500.0, 100.0) for _ in range(4)]
    doubtful, sure = selector(-5.0, 36.0), selector(-5.0, 16.0)
    assert doubtful.may_begin([*others, doubtful])
    assert not sure.may_begin([*others, sure])


def test_a_single_engine_decides_as_it_would_without_a_fleet() -> None:
    rng = np.random.default_rng(7)
    decided = set()
    for _ in range(300):
        alone = PolicySelector(100)
        for _ in range(int(rng.integers(1, 30))):
            alone.note(int(rng.integers(-5, 6)), 10)
        decided.add(alone.is_due_for_change())
        assert alone.may_begin([alone]) == alone.is_due_for_change()
    assert decided == {True, False}
