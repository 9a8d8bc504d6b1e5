"""What people read of admission: why somebody waits, in ``kvgraph status`` and on /metrics."""

from __future__ import annotations

from typing import Any

from kvgraph.advisor.admission.wording import admission_facts
from kvgraph.dashboards.admission_metrics import room_metrics
from kvgraph.graph.messages.advice import AdmissionAdvice

REPORT = {
    "waiting": 7, "waiting_blocks": 210, "oldest_s": 12.4, "held": 40, "released": [20, 10, 3],
    "waited_s": 900.0, "longest_s": 119.6, "not_held": 960, "queued_share": 0.414,
}  # fmt: skip


def facts(room: int | None, report: dict[str, Any] | None) -> dict[str, str]:
    said = {"room_blocks": room, "live_sessions": 38, "fitting_sessions": 31}
    return admission_facts({"room": said, "graph": {"admission": report}})


def test_a_closed_engine_says_who_waits_and_why() -> None:
    assert facts(120, REPORT) == {
        "room": "for 120 blocks of new context: 31 agents fit, 38 are live",
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


def test_a_thrashing_engine_that_holds_nobody_is_shown_and_others_are_not() -> None:
    assert facts(0, None)["held"] == "nobody: admission is off there"
    assert facts(None, None) == {}
    assert admission_facts({"room": None, "graph": None}) == {}


def test_metrics_name_room_only_where_it_is_limited() -> None:
    said = [("a", AdmissionAdvice(1, 0.0, None, 3, 9)), ("b", AdmissionAdvice(2, 0.0, 40, 9, 7))]
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
        ("kvgraph_admission_room_blocks", "b"): 40,
    }  # fmt: skip
