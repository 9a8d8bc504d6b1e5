"""What callers said: from the wire into a trace, and from a trace to a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.policies.registry import DEFAULT, POLICIES
from kvgraph.advisor.replay.arms import (
    BY_DEFAULT,
    LAYERS,
    ORDERS,
    Settings,
    arm_names,
    chosen_arms,
    graph_policies,
    new_order,
    run_arm,
)
from kvgraph.advisor.replay.events import TraceEvents
from kvgraph.advisor.replay.graph_order import GraphOrder
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorder import Recorder
from kvgraph.advisor.replay.trace import Trace, TraceError
from kvgraph.graph.types import Authority, SourceLayer
from kvgraph.graph.wire.events import RequestFinished, RequestStarted, Segment

READ = BY_DEFAULT + LAYERS

HEADER = {"kvgraph_trace": 1, "block_size": 16}


def line(at: float, blocks: list[int], session: str | None = "a", **said: Any) -> dict[str, Any]:
    body = {"at": at, "input_length": 16 * len(blocks), "output_length": 3, "hash_ids": blocks}
    return {**body, "session": session, **said}


def trace_of(tmp_path: Path, *lines: dict[str, Any]) -> Trace:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [HEADER, *lines]))
    return load_trace(path)


TOLD = {
    "waiting_for_tool": True,
    "expected_return_s": 4.5,
    "layers": [["capabilities", 0, 16], ["rules", 16, 20]],
    "tenant": "acme",
    "seconds": 2.0,
}


def test_what_callers_said_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        line(9.0, [1, 2, 3], ended=True),
        line(1.0, [1, 2], **TOLD),
        line(5.0, [1, 2], waiting_for_tool=False),
    )
    said = trace.said
    assert said is not None
    assert said.waiting.tolist() == [1, 0, -1]
    assert said.ended.tolist() == [False, False, True]
    assert said.expected_return_s[0] == 4.5
    assert np.isnan(said.expected_return_s[1:]).all()
    assert said.layers == (
        ((SourceLayer.CAPABILITIES, 0, 16), (SourceLayer.RULES, 16, 20)), (), (),
    )  # fmt: skip
    assert said.tenant.tolist() == [0, -1, -1]
    assert said.anything


def test_a_part_of_a_trace_keeps_what_was_said_of_it(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, line(1.0, [1]), line(2.0, [1, 2], **TOLD))
    said = trace.head(0.5).said
    assert said is not None
    assert len(said.waiting) == len(said.layers) == 1
    assert not said.anything


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"waiting_for_tool": "yes"}, "waiting_for_tool"),
        ({"expected_return_s": -1}, "expected_return_s"),
        ({"expected_return_s": 1e300}, "expected_return_s"),
        ({"layers": [["wishes", 0, 1]]}, "layers: 'wishes': allowed: axioms"),
        ({"layers": [["rules", 9, 1]]}, "layers: tokens 9 to 1"),
        ({"layers": [["rules", 0, 99]]}, "layers: tokens 0 to 99 of 16"),
        ({"layers": [["rules", -1, 1]]}, "layers"),
        ({"layers": [["rules", 0]]}, "layers"),
        ({"layers": [["rules", 0, 1]] * 2000}, "layers"),
        ({"tenant": "x" * 2000}, "tenant"),
        ({"tenant": 7}, "tenant"),
    ],
)
def test_what_cannot_have_been_said_names_line_and_field(
    tmp_path: Path, said: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: .*{problem}"):
        trace_of(tmp_path, line(1.0, [1], **said))


def test_a_foreign_trace_says_no_such_thing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(row | {"waiting_for_tool": True}) + "\n")
    with pytest.raises(TraceError, match="waiting_for_tool does not belong"):
        load_trace(path)


def test_without_hints_nobody_says_anything(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, line(1.0, [1, 2], **TOLD), line(2.0, [1, 2, 3], ended=True))
    trace_events = TraceEvents(trace, hints=False)
    for request in range(2):
        started, finished = trace_events.started(request, 0), trace_events.finished(request, 5.0)
        assert (started.session, started.tenant, started.segments) == (None, None, ())
        assert (finished.session, finished.tenant) == (None, None)
        assert (finished.waiting_for_tool, finished.expected_return_s) == (None, None)
        assert not finished.session_ended


def test_with_hints_callers_say_what_the_trace_says(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, line(1.0, [1, 2], **TOLD), line(5.0, [1, 2, 3]))
    trace_events = TraceEvents(trace, hints=True)
    started, finished = trace_events.started(0, 0), trace_events.finished(0, 0.0)
    assert started.segments == (Segment(3, 0, 16), Segment(2, 16, 20))
    assert started.tenant == finished.tenant == "t0"
    assert started.session == finished.session == "s0"
    assert finished.waiting_for_tool is True
    # Its request took two seconds, and takes none here: the pause begins when it really did.
    assert finished.expected_return_s == pytest.approx(6.5)
    assert trace_events.finished(0, 30.0).expected_return_s == pytest.approx(4.5)
    assert not trace_events.finished(1, 9.0).session_ended, "the trace did not say so"


def test_with_layers_an_engine_reads_the_parts_of_a_prompt_and_nothing_else(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, line(1.0, [1, 2], **TOLD), line(5.0, [1, 2, 3]))
    events = TraceEvents(trace, hints=False, layers=True)
    started, finished = events.started(0, 0), events.finished(0, 0.0)
    read = int(Authority.INFERRED)
    assert started.segments == (
        Segment(3, 0, 16, authority=read), Segment(2, 16, 20, authority=read),
    )  # fmt: skip
    assert (started.tenant, started.session, finished.waiting_for_tool) == (None, None, None)
    assert TraceEvents(trace, hints=True, layers=True).started(0, 0).segments == (
        Segment(3, 0, 16), Segment(2, 16, 20),
    )  # fmt: skip


def test_with_stops_an_engine_reads_why_answers_ended_and_nothing_else(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, line(1.0, [1, 2], **TOLD), line(5.0, [1, 2, 3], ended=True))
    events = TraceEvents(trace, hints=False, stops=True)
    started, finished = events.started(0, 0), events.finished(0, 0.0)
    assert (started.tenant, started.session, started.segments) == (None, None, ())
    assert (finished.waiting_for_tool, finished.expected_return_s) == (True, None)
    assert not events.finished(1, 9.0).session_ended
    assert events.finished(1, 9.0).waiting_for_tool is None


def test_a_system_text_that_is_read_outlives_others_prompts(tmp_path: Path) -> None:
    head = {"layers": [["rules", 0, 32]]}
    chats = [line(10.0 + i, [1, 2, 10 + i], **head) for i in range(3)]
    others = [line(20.0 + i, [100 + 10 * i + j for j in range(10)], None) for i in range(12)]
    trace = trace_of(tmp_path, *chats, *others, line(60.0, [1, 2, 20], **head))
    found = {name: run_arm(name, trace, 48, Settings())[-1] for name in ("lru", "default", READ)}
    assert found == {"lru": 0, "default": 0, READ: 2}


def test_with_hints_a_trace_that_says_nothing_knows_last_turns(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, line(1.0, [1, 2]), line(2.0, [1, 2, 3]))
    trace_events = TraceEvents(trace, hints=True)
    assert [trace_events.finished(request, 0.0).session_ended for request in range(2)] == [
        False,
        True,
    ]


def test_unnamed_sessions_may_still_say_why_answers_ended(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, line(1.0, [1, 2], waiting_for_tool=False)).unnamed()
    finished = TraceEvents(trace, hints=True).finished(0, 0.0)
    assert finished.session is None
    assert finished.waiting_for_tool is False


def test_a_plain_arm_finds_the_same_whatever_the_names(tmp_path: Path) -> None:
    """Without hints, names in the trace are nobody's business; LRU needs no graph."""
    chains = [[1, 2], [1, 2, 3], [9], [9, 8], [1, 2, 3, 4], [7, 6], [9, 8, 5], [1, 2, 3]] * 4
    rows = [line(float(i), chain, session=f"s{i % 3}") for i, chain in enumerate(chains)]
    named, unnamed = trace_of(tmp_path, *rows), trace_of(tmp_path, *rows).unnamed()
    for name in POLICIES.keys() - ORDERS.keys():
        orders = [new_order(name, trace, Settings()) for trace in (named, unnamed)]
        assert all(isinstance(order, GraphOrder) for order in orders)
        told = [TraceEvents(trace, hints=False).finished(3, 0.0) for trace in (named, unnamed)]
        assert told[0] == told[1]


def test_the_recorder_writes_what_callers_say_and_no_name(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    recorder = Recorder(path, clock=lambda: 0.0, secret=b"k" * 32)
    hashes = np.arange(1, 3, dtype="<u8").tobytes()
    segments = (Segment(2, 0, 16, None, "secret.md"), Segment(7, 16, 99))
    for request, waiting in enumerate((True, False, None)):
        known = (f"r{request}", hashes, 32)
        recorder("e", [RequestStarted(*known, 0, 16, "agent", "acme", segments)])
        expected = 3.5 if waiting else None
        finished = RequestFinished(*known, 40, "stop", "agent", "acme", waiting, expected)
        recorder("e", [finished])
    recorder.close()
    text = path.read_text()
    assert not any(name in text for name in ("agent", "acme", "secret"))
    lines = [json.loads(each) for each in text.splitlines()[1:]]
    assert [each.get("waiting_for_tool") for each in lines] == [True, False, None]
    assert [each.get("expected_return_s") for each in lines] == [3.5, None, None]
    assert lines[0]["layers"] == [["rules", 0, 16], ["tool_result", 16, 32]]
    assert len({each["tenant"] for each in lines}) == 1
    assert lines[0]["tenant"] != lines[0]["session"]
    said = load_trace(path).said
    assert said is not None
    assert said.waiting.tolist() == [1, 0, -1]
    assert said.tenant.tolist() == [0, 0, 0]


def test_default_is_what_a_sidecar_runs_unconfigured() -> None:
    config = Config()
    live = config.policy.policy(config.score.weights())
    assert graph_policies()["default"](Settings()).name == live.name == DEFAULT
    assert chosen_arms(["default", "default+hints"]) == ["default", "default+hints"]


def test_all_runs_no_policy_twice() -> None:
    names = arm_names()
    assert "default" not in names
    assert [name for name in names if name.endswith("+hints")] == [f"{DEFAULT}+hints"]
    assert [names.count(name) for name in POLICIES] == [1] * len(POLICIES)
    assert len(names) == len(set(names))
