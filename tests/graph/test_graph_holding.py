"""The rule that engine and lab hold by: who waits, how long, and who starts when."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from kvgraph.graph.admission import HoldingBounds, HoldingRule, RoomLedger, new_context_blocks
from kvgraph.graph.release_order import _MOST_TENANTS, Held, HoldingOrder
from kvgraph.graph.wire.advice import HOLD_PATIENCE_S, AdmissionAdvice
from kvgraph.graph.wire.events import HOLD_ENDS

POOL, MOST_S = 1000, 100.0


def word(room: int | None, ts: float = 0.0) -> AdmissionAdvice:
    return AdmissionAdvice(1, ts, room, 2, 1, ts)


def asks(name: str, since: float, blocks: int = 10, **facts: Any) -> Held:
    return Held(name, since, blocks, **facts)


def meets(rule: HoldingRule, requests: int, *, queued: bool) -> None:
    """So many requests come, and others stand in the queue then, or do not."""
    for _ in range(requests):
        rule.saturation.note_arrival(queued=queued)


def busy(bounds: HoldingBounds) -> HoldingRule:
    """Of an engine that ran a moment ago, and had a long queue."""
    rule = HoldingRule(bounds)
    meets(rule, 100, queued=True)
    step(rule, 0.0, None)
    return rule


@pytest.fixture
def rule() -> HoldingRule:
    return busy(HoldingBounds(POOL, MOST_S))


def waits(rule: HoldingRule, names: str, since: float, blocks: int = 10, **facts: Any) -> None:
    """These come to a queue where there is no room, and are held."""
    for name in names.split():
        assert rule.arrives(asks(name, since, blocks, **facts), word(0), idle=False, queued=True)


def step(
    rule: HoldingRule, now: float, room: int | None, *, idle: bool = False, free: bool = False
) -> list[str]:
    found = rule.released(word(room, now), now, idle=idle, free=free)
    return [f"{held.request_id} {reason}" for held, reason in found]


def test_what_a_request_brings_is_nothing_where_half_of_a_session_is_there() -> None:
    assert new_context_blocks(10, 5, POOL, new=False) == 0
    assert new_context_blocks(10, 4, POOL, new=False) == 6
    assert new_context_blocks(10, 9, POOL, new=True) == 1
    assert new_context_blocks(10, 10, POOL, new=True) == 1, (
        "a new session wants room, whatever it shares"
    )
    for new in (True, False):
        assert new_context_blocks(3, 0, POOL, new=new) == 0, "a short prompt takes little room"


def test_nobody_is_held_by_an_engine_that_keeps_up() -> None:
    rule = HoldingRule(HoldingBounds(POOL, MOST_S))
    meets(rule, 100, queued=False)
    for number in range(100):
        asked = asks(str(number), 1.0)
        assert not rule.arrives(asked, word(0), idle=False, queued=number % 4 == 0)
        step(rule, 1.0, None)


def test_once_few_prompts_queue_those_that_wait_start_one_at_a_time(rule: HoldingRule) -> None:
    waits(rule, "a b c", 1.0)
    assert step(rule, 2.0, 0, free=True) == []
    meets(rule, 100, queued=False)
    assert step(rule, 2.5, 0, free=True) == [], "holding shortens the queue: it is not at ease yet"
    meets(rule, 30, queued=False)
    assert step(rule, 3.0, 0, free=True) == ["a patience"]
    assert rule.arrives(asks("d", 3.1), word(0), idle=False, queued=False), "behind the others"
    assert step(rule, 3.2, 0) == [], "its prompt is under way"
    assert step(rule, 4.0, 0, free=True) == [], "the engine rests for a quarter of that time"
    assert step(rule, 4.3, 0, free=True) == ["b patience"]


def test_holding_does_not_end_itself_by_shortening_the_queue(rule: HoldingRule) -> None:
    waits(rule, "waits", 1.0)
    for number in range(200):
        asked = asks(str(number), 1.0 + number, 0)
        assert not rule.arrives(asked, word(0), idle=False, queued=False), "it brings nothing"
        step(rule, 1.0, 0)
    assert rule.saturation.is_reached, "one waits for room all the time"
    assert rule.arrives(asks("next", 300.0), word(0), idle=False, queued=False)
    rule.removed("waits")
    rule.removed("next")
    for number in range(200):
        rule.arrives(asks(str(number), 400.0 + number, 0), word(0), idle=False, queued=False)
        step(rule, 400.0, 0)
    assert not rule.saturation.is_reached


@pytest.mark.parametrize(("wasted", "starts_after"), [(0.0, 0.35), (0.06, 0.35), (0.16, 0.8)])
def test_who_starts_without_room_is_rarer_the_more_is_computed_again(
    rule: HoldingRule, wasted: float, starts_after: float
) -> None:
    said = AdmissionAdvice(1, 0.0, 0, 2, 1, 0.0, wasted=wasted)
    waits(rule, "a b", 0.0)

    def starts(now: float) -> int:
        return len(rule.released(said, now, idle=False, free=True, prefills=True))

    patient = HOLD_PATIENCE_S + 1.0
    assert starts(patient) == 1
    assert not starts(patient + 1.0), "it took a second"
    begin = patient + 1.0 + starts_after
    assert not starts(begin - 0.15)
    assert starts(begin) == 1


@pytest.mark.parametrize(
    ("idle", "prefilled", "starts_after"),
    [(False, 0.0, 0.25), (False, 0.5, 0.75), (True, 0.0, 0.0)],
)
def test_a_rest_that_nobody_uses_is_soon_over(
    rule: HoldingRule, idle: bool, prefilled: float, starts_after: float
) -> None:
    """Or an engine whose prompts are all computed again would stand still."""
    said = AdmissionAdvice(1, 0.0, 0, 2, 1, 0.0, wasted=1.0)
    waits(rule, "a b", 0.0)
    patient = HOLD_PATIENCE_S + 1.0
    assert len(rule.released(said, patient, idle=False, free=True)) == 1
    assert not rule.released(said, patient + 0.95, idle=False, free=False)
    began = next(
        after
        for after in itertools.count(0.0, 0.05)
        if rule.released(
            said, patient + 1.0 + after, idle=idle, free=True, prefills=0 < after <= prefilled
        )
    )
    assert began == pytest.approx(starts_after, abs=0.06), "its prompt took a second"


def test_the_time_without_work_is_no_part_of_a_prompts(rule: HoldingRule) -> None:
    """The client of the last one that started went away, and the engine took no step until then."""
    waits(rule, "gone", 0.0)
    assert step(rule, HOLD_PATIENCE_S + 1.0, 0, free=True) == ["gone patience"]
    later = 60.0  # before the bound at which no prompt is measured any longer
    assert not rule.arrives(asks("first", later, 0), word(0), idle=True, queued=False)
    waits(rule, "a b", later + 1.0)
    assert step(rule, later + 2.0, 0, free=True) == []
    assert step(rule, later + HOLD_PATIENCE_S + 1.0, 0, free=True) == ["a patience"]


def test_those_that_come_together_are_one_sign_of_a_queue() -> None:
    rule = HoldingRule(HoldingBounds(POOL, MOST_S))
    for _ in range(200):
        for sibling in range(8):
            rule.arrives(asks(str(sibling), 0.0, 0), word(0), idle=False, queued=sibling > 0)
        step(rule, 0.0, 0)
    assert not rule.saturation.is_reached


def test_patient_is_who_waited_as_long_as_a_pool_of_prompts_takes(rule: HoldingRule) -> None:
    waits(rule, "measured", 0.0)
    assert step(rule, 10.0, 0, free=True) == ["measured patience"]
    step(rule, 10.04, 0, free=True)  # ten blocks took 40 ms: a thousand would take four seconds
    waits(rule, "short", 20.0)
    waits(rule, "long", 20.0, 200)
    assert step(rule, 23.9, 0, free=True) == []
    assert step(rule, 24.1, 0, free=True) == ["short patience"]


@pytest.mark.parametrize(("pool", "step_blocks", "starts"), [(6400, 25, 3), (640, 25, 1)])
def test_so_many_start_without_room_as_one_step_or_a_64th_of_the_pool_takes(
    pool: int, step_blocks: int, starts: int
) -> None:
    rule = busy(HoldingBounds(pool, MOST_S, step_blocks))
    waits(rule, "a b c d", 0.0)
    begun = step(rule, HOLD_PATIENCE_S + 1.0, 0, free=True)
    assert begun == ["a patience", "b patience", "c patience"][:starts]


def test_each_that_comes_during_a_long_step_to_a_queue_is_a_sign_of_it() -> None:
    rule = HoldingRule(HoldingBounds(POOL, MOST_S))
    for number in range(9):
        for other in range(4):
            rule.arrives(asks(f"{number}.{other}", 0.0, 0), word(0), idle=False, queued=True)
        step(rule, 0.0, 0)
    assert rule.saturation.is_reached


def test_what_was_let_in_is_off_the_room_until_a_word_knows_of_it(rule: HoldingRule) -> None:
    assert not rule.arrives(asks("a", 1.0), word(25, 1.0), idle=False, queued=True)
    assert not rule.arrives(asks("b", 1.0), word(25, 1.0), idle=False, queued=True)
    assert rule.arrives(asks("c", 1.0), word(25, 1.0), idle=False, queued=True), "five are left"
    assert step(rule, 9.0, 25) == [], "let in, and waiting for the engine ever since"
    rule.started("a", 9.0)
    rule.ended("b")
    unaware = AdmissionAdvice(1, 9.1, 15, 2, 1, known_of=8.9)
    assert rule.released(unaware, 9.1, idle=False, free=False) == []
    assert step(rule, 11.0, 15) == ["c room"]


def test_the_ledger_keeps_what_a_word_cannot_know_of_and_nothing_else() -> None:
    ledger = RoomLedger()

    def left(ts: float, known_of: float = 0.0) -> float:
        return ledger.remaining(AdmissionAdvice(1, ts, 100, 2, 1, known_of))

    ledger.promise("gone", 30)
    ledger.promise("a", 10)
    assert left(1.0) == 60
    ledger.drop("gone")
    assert left(1.0) == 90
    ledger.begin("a", 9.0)
    assert left(9.5, known_of=8.9) == 90
    assert left(9.5, known_of=9.1) == 100, "the word was made with the start in sight"
    ledger.promise("b", 10)
    ledger.begin("b", 12.0)
    assert left(12.9) == 90
    assert left(13.1) == 100, "news take less than a second"
    for name, now in (("c", 20.0), ("d", 31.0)):
        ledger.promise(name, 10)
        ledger.begin(name, now)
    assert left(20.5) == 90, "c began longer ago than any word is acted on"
    ledger.drop("d")
    assert left(20.5) == 90, "what began is the engine's to report"


def test_who_had_its_context_and_lost_it_in_the_line_is_held_at_its_turn(rule: HoldingRule) -> None:
    assert not rule.arrives(asks("warm", 1.0, 0), word(0), idle=False, queued=True)
    assert rule.turn_comes(asks("warm", 60.0, 10), word(0))
    assert step(rule, 61.0, 10) == ["warm room"]
    assert not rule.turn_comes(asks("warm", 90.0, 10), word(0)), "room was taken for it"


def test_who_was_patient_starts_where_nobody_else_waits_one_at_a_time(rule: HoldingRule) -> None:
    waits(rule, "oldest", 0.0)
    waits(rule, "returning", 1.0, returning=True)
    assert step(rule, HOLD_PATIENCE_S - 1.0, 0, free=True) == []
    assert step(rule, HOLD_PATIENCE_S, 0) == []
    assert step(rule, HOLD_PATIENCE_S + 1.0, 0, free=True) == ["oldest patience"]
    assert step(rule, HOLD_PATIENCE_S + 6.0, 0) == []
    assert step(rule, HOLD_PATIENCE_S + 11.0, 0, free=True) == [], "its prompt took ten seconds"
    assert step(rule, HOLD_PATIENCE_S + 13.4, 0, free=True) == [], "and a quarter more in peace"
    assert step(rule, HOLD_PATIENCE_S + 13.6, 0, free=True) == ["returning patience"]


def test_short_prompts_go_before_long_ones_where_there_is_no_room_but_not_for_ever() -> None:
    rule = busy(HoldingBounds(POOL, 4 * MOST_S))
    waits(rule, "long", 1.0, 40)
    for now in range(1, 95):
        if now % 2:  # there always is a short one that has waited for long enough
            rule.arrives(asks(f"short at {now}", float(now), 10), word(0), idle=False, queued=True)
        found = step(rule, float(now), 0, free=now > 12)
        assert now > 13 or found in ([], ["short at 1 patience"])
        if "long patience" in found:
            assert 41 <= now <= 55, "forty seconds for forty blocks are as long as ten for ten"
            return
    pytest.fail("the long one is overtaken by whatever comes")


def test_whoever_waited_for_a_quarter_of_the_bound_starts_without_a_rest(rule: HoldingRule) -> None:
    for name, since in (("a", 0.0), ("b", 25.0), ("c", 70.0)):
        waits(rule, name, since)
    assert step(rule, 61.0, 0, free=True) == ["a patience"]
    assert step(rule, 81.0, 0, free=True) == ["b patience"], "a's prompt took twenty seconds"
    assert step(rule, 91.0, 0, free=True) == [], "b's took ten, and c waits since lately"
    assert step(rule, 93.6, 0, free=True) == ["c patience"]


def test_urgent_ones_start_first_then_returning_sessions_then_new_ones(rule: HoldingRule) -> None:
    waits(rule, "new", 1.0)
    waits(rule, "returning", 2.0, returning=True)
    waits(rule, "urgent", 3.0, priority=-1)
    assert step(rule, 4.0, 10) == ["urgent room"]
    assert step(rule, 4.1, 10) == []
    assert step(rule, 4.2, 30) == ["returning room", "new room"]


@pytest.mark.parametrize(("blocks", "enough"), [(10, 10), (249, 249), (250, 250), (900, 250)])
def test_who_starts_fits_in_the_room_or_a_quarter_of_the_pool_is_free(
    rule: HoldingRule, blocks: int, enough: int
) -> None:
    waits(rule, "a", 1.0, blocks)
    assert step(rule, 4.0, enough - 1) == []
    assert step(rule, 4.1, enough) == ["a room"]


def test_a_step_passes_where_nobody_waits_and_there_is_room_for_all(rule: HoldingRule) -> None:
    assert rule.passes(word(None, 1.0), 1.0)
    assert rule.passes(None, 1.0)
    assert not rule.passes(word(5, 1.0), 1.0), "there may be one that lost its context"
    assert rule.arrives(asks("a", 1.4), word(0), idle=True, queued=True), "it ran a moment ago"
    assert not rule.passes(None, 1.5), "one waits"
    assert step(rule, 90.0, 0, free=True) == ["a patience"]
    assert not rule.passes(None, 91.0), "how long its prompt takes is measured"
    assert step(rule, 92.0, None, free=True) == []
    assert rule.passes(None, 93.0)


def test_a_prompt_of_which_nothing_is_heard_is_not_measured_for_ever(rule: HoldingRule) -> None:
    """Its request may wait for its user, or be gone without a word."""
    waits(rule, "a", 1.0)
    assert step(rule, 90.0, 0, free=True) == ["a patience"]
    assert not rule.passes(None, 90.0 + MOST_S - 1.0)
    assert rule.passes(None, 90.0 + MOST_S)


def test_nobody_waits_beyond_the_bound_or_in_an_engine_at_rest(rule: HoldingRule) -> None:
    rng = random.Random(11)
    now, number, rest, waiting = 0.0, 0, 0.0, dict[str, Held]()
    for _ in range(20_000):
        now += rng.expovariate(5.0)
        room = rng.choice([0, 0, 0, 5, 40])
        idle, free = rng.random() < 0.1, rng.random() < 0.2
        if rng.random() < 0.3:
            number += 1
            held = asks(
                str(number), now, rng.choice([0, 5, 90, POOL]), returning=rng.random() < 0.5,
                priority=rng.choice([0, 0, 1]), tenant=rng.choice("ab"),
            )  # fmt: skip
            queued = rng.random() < 0.6
            if rule.arrives(held, word(room, now), idle=idle, queued=queued):
                assert 0 < held.blocks < POOL
                waiting[held.request_id] = held
        if waiting and rng.random() < 0.02:
            gone = rng.choice(sorted(waiting))
            assert rule.removed(gone) is waiting.pop(gone)
        rest = now if not idle or not waiting else rest
        found = rule.released(word(room, now), now, idle=idle, free=free)
        for held, reason in found:
            assert waiting.pop(held.request_id) is held
            rule.started(held.request_id, now)
            assert reason != "room" or room > 0
        assert len(rule) == len(waiting)
        assert all(now - held.since < MOST_S for held in waiting.values())
        assert not waiting or now - rest < 0.5 or found


def test_reasons_keep_their_places_on_the_wire() -> None:
    assert HOLD_ENDS == ("room", "bound", "idle", "open", "silence", "gone", "patience")


def order_of(*known: str) -> HoldingOrder:
    """An order that has served each of these tenants before."""
    order = HoldingOrder()
    for tenant in known:
        order.served(tenant)
    return order


def drain(order: HoldingOrder) -> list[str]:
    names = []
    while (held := order.peek()) is not None:
        assert order.take(held.request_id) is held
        names.append(held.request_id)
    return names


def test_names_that_were_served_once_push_out_nobody_who_came_again() -> None:
    order = order_of("modest", "modest", *(f"new {number}" for number in range(5000)))
    for number in range(50):
        order.add(Held(f"crowd {number}", 0.0, 10, tenant=f"another {number}"))
    order.add(Held("mine", 1.0, 10, tenant="modest"))
    first = [order.take(held.request_id) for _ in range(2) if (held := order.peek()) is not None]
    assert "mine" in [held.request_id for held in first if held is not None]


def test_what_started_is_paid_for_even_if_nothing_of_its_tenant_waited_since() -> None:
    order = order_of(*"ab")
    order.add(Held("a0", 0.0, 50, tenant="a"))
    order.add(Held("b0", 0.0, 10, tenant="b"))
    assert order.take(order.peek().request_id).request_id == "a0"
    order.add(Held("a1", 1.0, 50, tenant="a"))
    for number in range(1, 7):
        order.add(Held(f"b{number}", 1.0, 10, tenant="b"))
    assert drain(order) == ["b0", "b1", "b2", "b3", "b4", "a1", "b5", "b6"]


def test_tenants_without_an_end_that_start_are_forgotten_the_oldest_first() -> None:
    order = HoldingOrder()
    order.add(Held("one", 0.0, 3, tenant="honest", priority=1))
    for number in range(2 * _MOST_TENANTS):
        order.add(Held(f"r{number}", 0.0, 1, tenant=f"salt-{number}"))
        assert order.take(f"r{number}") is not None
    assert order.tenants == _MOST_TENANTS + 1, "those of one request, and what they are together"
    assert order.entries <= 67
    assert drain(order) == ["one"]


def test_sessions_that_return_hold_up_no_other_tenants_new_ones() -> None:
    """They go before their own tenant's alone: fifty took all room for as long as they came."""
    order = order_of("many", "one")
    for number in range(50):
        order.add(Held(f"many{number}", 0.0, 10, returning=True, tenant="many"))
    order.add(Held("new", 0.0, 10, tenant="many"))
    order.add(Held("one", 0.0, 10, tenant="one"))
    first = drain(order)
    assert first.index("one") <= 1
    assert first[-1] == "new"


def anyone(rng: random.Random, number: int) -> Held:
    return Held(
        f"r{number}", float(number), rng.randint(1, 9), rng.choice([0, 0, 1]),
        rng.random() < 0.3, tenant=rng.choice("abcd"),
    )  # fmt: skip


def test_the_heap_gives_what_a_search_through_all_gives() -> None:
    rng, order = random.Random(3), order_of(*"abcd")
    waiting: dict[str, tuple[Held, float, int]] = {}
    ends: dict[str | None, float] = {}
    now = 0.0

    def turn(name: str) -> tuple[int, float, bool, int]:
        held, since, number = waiting[name]
        return held.priority, max(since, ends.get(held.tenant, 0.0)), not held.returning, number

    def head(name: str) -> bool:
        held, _, number = waiting[name]
        alike = (held.tenant, held.priority, held.returning)
        return not any(
            (each.tenant, each.priority, each.returning) == alike and other < number
            for each, _, other in waiting.values()
        )

    for number in range(4000):
        if len(waiting) < 40 and rng.random() < 0.55:
            held = anyone(rng, number)
            order.add(held)
            waiting[held.request_id] = held, now, number
        elif waiting:
            best = min((name for name in waiting if head(name)), key=turn)
            found = order.peek()
            assert found.request_id == best
            name = rng.choice([best, order.oldest().request_id, rng.choice(sorted(waiting))])
            if rng.random() < 0.4:
                assert order.drop(name) is waiting.pop(name)[0]
                continue
            start = turn(name)[1]
            held = waiting.pop(name)[0]
            assert order.take(name) is held
            ends[held.tenant] = start + held.blocks
            now = max(now, start) if name == best else now
    assert sorted(drain(order)) == sorted(waiting)


def test_the_patient_start_by_priority_then_tenant_then_what_they_waited_for_their_size() -> None:
    order = order_of(*"abc")
    order.add(Held("a-long", 0.0, 100, tenant="a"))
    order.add(Held("a-short", 5.0, 10, returning=True, tenant="a"))
    order.add(Held("b", 6.0, 100, tenant="b"))
    order.add(Held("urgent", 7.0, 300, -1, tenant="a"))
    order.add(Held("late", 50.0, 1, tenant="c"))
    assert order.pop_patient(-1.0, -9.0, 20.0) is None
    names = []
    while (held := order.pop_patient(20.0, -9.0, 30.0)) is not None:
        names.append(held.request_id)
    assert names == ["urgent", "b", "a-short", "a-long"]
    assert drain(order) == ["late"]


def test_the_urgent_start_first_behind_any_number_of_tenants() -> None:
    order = HoldingOrder()
    for number in range(1_000):
        order.add(Held(f"{number}", 0.0, 10, 5, tenant=f"t{number}"))
    order.add(Held("urgent", 1.0, 10, -8, tenant="late"))
    assert order.pop_patient(2.0, -9.0, 3.0).request_id == "urgent"  # type: ignore[union-attr]
    assert order.pop_patient(2.0, -9.0, 3.0).request_id == "0"  # type: ignore[union-attr]


def test_who_is_overdue_goes_before_those_of_its_tenant_that_are_shorter() -> None:
    order = HoldingOrder()
    order.add(Held("long", 1.0, 100))
    order.add(Held("longer", 2.0, 200))
    order.add(Held("short", 3.0, 1))
    names = [order.pop_patient(60.0, 2.0, 70.0).request_id for _ in range(3)]  # type: ignore[union-attr]
    assert names == ["long", "longer", "short"]


def crowd(order: HoldingOrder, since: int, count: int, uses: int = 1) -> None:
    """Requests of somebody who takes a new name for every ``uses`` of them."""
    for number in range(since, since + count):
        order.add(Held(f"crowd {number}", float(number), 5, tenant=f"salt-{number // uses}"))


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("held", [10, 400])
def test_a_new_name_for_each_request_is_the_share_of_one_tenant(held: int, patient: bool) -> None:
    """And the crowd stays as large as it is, whatever starts of it."""
    order, started, number = order_of("h"), [], 0
    for round_ in range(40):
        crowd(order, number, more := held + round_ - len(order))
        number += more
        if round_ == 4:
            for each in range(6):
                order.add(Held(f"honest {each}", float(number), 5, tenant="h"))
        if patient:
            found = order.pop_patient(float(number), -1.0, float(number))
        else:
            found = order.take(order.peek().request_id)  # type: ignore[union-attr]
        started.append(found.request_id.split()[0])  # type: ignore[union-attr]
    honest = [at for at, name in enumerate(started) if name == "honest"]
    assert len(honest) == 6
    assert honest[-1] <= 4 + 2 * 6


def test_all_that_wait_of_a_tenant_leave_the_strangers_with_its_first() -> None:
    order = HoldingOrder()
    for number in range(3):
        order.add(Held(f"a{number}", 0.0, 10, tenant="a"))
    crowd(order, 0, 50)
    assert order.take("a0") is not None
    names = drain(order)
    assert names.index("a2") <= 6, "it takes turns with all strangers together"
    assert [name for name in names if name[0] == "a"] == ["a1", "a2"]
    assert not order._unknown


def test_who_goes_away_as_a_stranger_leaves_nothing_behind() -> None:
    order = HoldingOrder()
    crowd(order, 0, 50, uses=5)
    for number in range(50):
        assert order.drop(f"crowd {number}") is not None
    assert not order._unknown
    assert not order._lanes
    assert order.peek() is None


def test_of_more_tenants_than_are_looked_at_each_has_its_turn() -> None:
    tenants = [f"t{number}" for number in range(200)]
    order = order_of(*tenants)
    for tenant, each in itertools.product(tenants, range(20)):
        order.add(Held(f"{tenant} {each}", 0.0, 1, tenant=tenant))
    found = [order.pop_patient(1.0, -9.0, 2.0) for _ in range(600)]
    assert {held.tenant for held in found if held} == set(tenants)
