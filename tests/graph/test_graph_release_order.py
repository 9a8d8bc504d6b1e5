"""Whom a tenant's requests stand behind, what is paid for, and what the order remembers."""

from __future__ import annotations

import random

import pytest
from kvgraph.graph.waiting.release_order import _MOST_TENANTS, Held, HoldingOrder


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
    order = HoldingOrder()
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
    assert order.tenants == _MOST_TENANTS
    assert order.entries <= 67
    assert drain(order) == ["one"]


def anyone(rng: random.Random, number: int) -> Held:
    return Held(
        f"r{number}", float(number), rng.randint(1, 9), rng.choice([0, 0, 1]),
        rng.random() < 0.3, tenant=rng.choice("abcd"),
    )  # fmt: skip


def test_the_heap_gives_what_a_search_through_all_gives() -> None:
    rng, order = random.Random(3), HoldingOrder()
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
    order = HoldingOrder()
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
