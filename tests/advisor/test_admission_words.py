"""What people read of admission: why somebody waits, in ``kvgraph status`` and on /metrics."""

from __future__ import annotations

from typing import Any

from kvgraph.advisor.words.waits import admission_facts
from kvgraph.dashboards.metrics import room_metrics
from kvgraph.graph.wire.advice import AdmissionAdvice

REPORT = {
    "waiting": 7, "waiting_blocks": 210, "oldest_s": 12.4, "held": 40, "released": [20, 10, 3],
    "waited_s": 900.0, "longest_s": 119.6, "not_held": 960, "queued_share": 0.414,
}  # fmt: skip


def facts(room: int | None, report: dict[str, Any] | None, lifted: int = 0) -> dict[str, str]:
    said = {
        "room_blocks": room, "live_sessions": 38, "fitting_sessions": 31, "again": 0.41,
        "lifted_pools": lifted,
    }  # fmt: skip
    return admission_facts({"room": said, "graph": {"admission": report}})


def test_a_closed_engine_says_who_waits_and_why() -> None:
    assert facts(120, REPORT) == {
        "room": "for 120 blocks of new context: 31 agents fit, 38 are live",
        "computed again": "41% of the latest prompts",
        "held": "7, the first for 12 s, 210 blocks",
        "held so far": "40 of 1,000, 120 s at most",
        "wait no longer": "room 20, bound 10, idle 3",
        "meet a queue": "41% of the latest requests; from 40% on new ones may "
        "wait, and then until it is below 15%",
    }


def test_who_waits_now_counts_for_the_longest_hold() -> None:
    said = facts(0, {**REPORT, "oldest_s": 200.0})
    assert said["held so far"] == "40 of 1,000, 200 s at most"


def test_an_open_one_says_so() -> None:
    idle = {**REPORT, "waiting": 0}
    said = facts(None, idle)
    assert said["room"] == "no limit: 31 agents fit, 38 are live"
    assert said["held"] == "nobody"


def test_a_lifted_limit_says_for_how_long_and_why() -> None:
    said = facts(None, {**REPORT, "waiting": 0}, lifted=30)
    assert said["room"] == (
        "no limit for the next 30 pools' worth of prompts, since one saved nothing: 31 agents fit, "
        "38 are live"
    )


def test_a_thrashing_engine_that_holds_nobody_is_shown_and_others_are_not() -> None:
    off = "nobody waits: admission is off there (AITHER_KVCACHE_ADMISSION)"
    assert facts(0, None)["held"] == off
    assert facts(None, None) == {}
    assert admission_facts({"room": None, "graph": None}) == {}


def test_metrics_name_room_only_where_it_is_limited() -> None:
    lifted = AdmissionAdvice(1, 0.0, None, 3, 9, again=0.84, lifted_pools=30)
    said = [("a", lifted), ("b", AdmissionAdvice(2, 0.0, 40, 9, 7, again=0.41))]
    values = {
        (sample.name, sample.labels["engine"]): sample.value
        for family in room_metrics(said)
        for sample in family.samples
    }
    assert values == {
        ("kvgraph_admission_live_sessions", "a"): 3, ("kvgraph_admission_live_sessions", "b"): 9,
        ("kvgraph_admission_fitting_sessions", "a"): 9,
        ("kvgraph_admission_fitting_sessions", "b"): 7,
        ("kvgraph_admission_closed", "a"): 0, ("kvgraph_admission_closed", "b"): 1,
        ("kvgraph_admission_computed_again", "a"): 0.84,
        ("kvgraph_admission_computed_again", "b"): 0.41,
        ("kvgraph_admission_lifted_pools", "a"): 30, ("kvgraph_admission_lifted_pools", "b"): 0,
        ("kvgraph_admission_room_blocks", "b"): 40,
    }  # fmt: skip
