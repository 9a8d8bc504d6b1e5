"""Whom a tenant's requests stand behind, what is paid for, and what the order remembers."""

from __future__ import annotations

import random

import pytest
from kvgraph.graph.release_order import _MOST_TENANTS, Held, HoldingOrder


def order_of(known: str) -> HoldingOrder:
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


@pytest.mark.parametrize("one_stays", [False, True])
def test_what_went_away_is_not_paid_for(one_stays: bool) -> None:
    """Refused after a minute, a client comes again: it has had nothing yet."""
    order = HoldingOrder()
    order.add(Held("b-first", 0.0, 50, tenant="b"))
    for number in range(100):
        order.add(Held(f"a{number}", 0.0, 50, tenant="a"))
    for number in range(one_stays, 100):
        assert order.drop(f"a{number}") is not None
    order.add(Held("a-new", 61.0, 50, tenant="a"))
    for number in range(300):
        order.add(Held(f"b{number}", 61.0, 50, tenant="b"))
    assert drain(order).index("a-new") <= 1 + 2 * one_stays


def test_what_started_is_paid_for_even_if_nothing_of_its_tenant_waited_since() -> None:
    order = order_of("ab")
    order.add(Held("a0", 0.0, 50, tenant="a"))
    order.add(Held("b0", 0.0, 10, tenant="b"))
    assert order.take(order.peek().request_id).request_id == "a0"
    order.add(Held("a1", 1.0, 50, tenant="a"))
    for number in range(1, 7):
        order.add(Held(f"b{number}", 1.0, 10, tenant="b"))
    assert drain(order) == ["b0", "b1", "b2", "b3", "b4", "a1", "b5", "b6"]


def test_tenants_without_an_end_cost_nothing() -> None:
    """Each asks once under a name of its own and goes away, while one waits."""
    order = HoldingOrder()
    order.add(Held("one", 0.0, 3, tenant="honest"))
    for number in range(3 * _MOST_TENANTS):
        order.add(Held(f"r{number}", 0.0, 1, tenant=f"salt-{number}"))
        assert order.drop(f"r{number}") is not None
    assert order.tenants == 0
    assert len(order._lanes) == 1
    assert order.entries <= 67


def test_tenants_without_an_end_that_start_are_forgotten_the_oldest_first() -> None:
    order = HoldingOrder()
    order.add(Held("one", 0.0, 3, tenant="honest", priority=1))
    for number in range(2 * _MOST_TENANTS):
        order.add(Held(f"r{number}", 0.0, 1, tenant=f"salt-{number}"))
        assert order.take(f"r{number}") is not None
    assert order.tenants == _MOST_TENANTS + 1, "those of one request, and what they are together"
    assert order.entries <= 67
    assert drain(order) == ["one"]


def anyone(rng: random.Random, number: int) -> Held:
    return Held(
        f"r{number}", float(number), rng.randint(1, 9), rng.choice([0, 0, 1]),
        rng.random() < 0.3, tenant=rng.choice("abcd"),
    )  # fmt: skip


def test_the_heap_gives_what_a_search_through_all_gives() -> None:
    rng, order = random.Random(3), order_of("abcd")
    waiting: dict[str, tuple[Held, float, int]] = {}
    ends: dict[str | None, float] = {}
    now = 0.0

    def turn(name: str) -> tuple[int, bool, float, int]:
        held, since, number = waiting[name]
        return held.priority, not held.returning, max(since, ends.get(held.tenant, 0.0)), number

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
            assert found is not None
            assert found.request_id == best
            name = rng.choice([best, order.oldest().request_id, rng.choice(sorted(waiting))])
            if rng.random() < 0.4:
                assert order.drop(name) is waiting.pop(name)[0]
                continue
            start = turn(name)[2]
            held = waiting.pop(name)[0]
            assert order.take(name) is held
            ends[held.tenant] = start + held.blocks
            now = max(now, start) if name == best else now
    assert sorted(drain(order)) == sorted(waiting)


def test_the_patient_start_by_priority_then_tenant_then_what_they_waited_for_their_size() -> None:
    order = order_of("abc")
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


def test_names_that_are_used_once_push_out_nobody_who_came_again() -> None:
    order = HoldingOrder()
    for _ in range(2):
        order.served("honest")
    for number in range(2 * _MOST_TENANTS):
        order.served(f"salt-{number}")
    crowd(order, 0, 30)
    order.add(Held("honest", 1.0, 5, tenant="honest"))
    assert drain(order).index("honest") <= 1


def test_of_more_tenants_than_are_looked_at_each_has_its_turn() -> None:
    order = HoldingOrder()
    for number in range(200):
        order.served(f"t{number}")
    for number in range(200):
        for each in range(20):
            order.add(Held(f"{number} {each}", 0.0, 1, tenant=f"t{number}"))
    found = [order.pop_patient(1.0, -9.0, 2.0) for _ in range(600)]
    assert {held.tenant for held in found if held} == {f"t{number}" for number in range(200)}
