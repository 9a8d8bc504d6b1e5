"""Trace readers: every format means what it says, and bad input is named by file and line."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.policies.registry import DEFAULT, POLICIES
from kvgraph.advisor.replay import reader
from kvgraph.advisor.replay import reader as lines
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
from kvgraph.advisor.replay.graph_order import GraphOrder, TraceEvents
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorder import Recorder
from kvgraph.advisor.replay.trace import Trace, TraceError
from kvgraph.graph.types import Authority, SourceLayer
from kvgraph.graph.wire.events import MAX_SEGMENTS, RequestFinished, RequestStarted, Segment
from wire_keys import pack

MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 3000, "input_length": 1500, "output_length": 9, "hash_ids": [7, 8, 9]},
    {"timestamp": 1000, "input_length": 600, "output_length": 1, "hash_ids": [7, 10]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_is_sorted_by_time_and_sessions_come_from_chains(
    tmp_path: Path, name: str
) -> None:
    trace = load_trace(write(tmp_path / name, MOONCAKE))
    assert trace.block_size == 512
    assert trace.at.tolist() == [0.0, 1.0, 3.0]
    assert [len(chain) for chain in trace.chains()] == [2, 2, 3]
    assert trace.full.tolist() == [2, 1, 2]
    # The third extends the first; the second only shares the first block with it.
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.last.tolist() == [False, True, True]
    assert trace.turns().tolist() == [0, 0, 1]
    assert not trace.has_sessions


def test_a_prefix_that_several_sessions_share_is_the_end_of_nobodys_turn(tmp_path: Path) -> None:
    chains = [[1, 2], [1, 3], [1], [1, 4], [1, 2, 5]]
    rows = [
        {"timestamp": i, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for i, ids in enumerate(chains)
    ]
    trace = load_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.session.tolist() == [0, 1, 2, 3, 0]


def test_equal_hashes_after_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 5]},
        {"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [2, 5]},
        {"timestamp": 2, "input_length": 1024, "output_length": 1, "hash_ids": [3, 3]},
    ]
    trace = load_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.num_blocks == 6
    assert len(np.unique(trace.keys())) == 6


def test_bailian_conversations_follow_their_parents(tmp_path: Path) -> None:
    rows = [
        {"chat_id": i, "parent_chat_id": parent, "timestamp": i * 1.5, "input_length": 40,
         "output_length": 3, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
        for i, parent in enumerate([-1, -1, 0, 2])
    ]  # fmt: skip
    trace = load_trace(write(tmp_path / "q.jsonl", rows))
    assert (trace.block_size, trace.has_sessions) == (16, True)
    assert trace.at.tolist() == [0.0, 1.5, 3.0, 4.5]
    first, other, second, third = trace.session.tolist()
    assert first == second == third != other


def test_aiperf_delays_count_from_the_end_of_the_turn_before(tmp_path: Path) -> None:
    body = {"input_length": 500, "output_length": 100, "hash_ids": [1]}
    rows = [
        {"session_id": "a", "timestamp": 1000, **body},
        {"session_id": "a", "delay": 2000, **body},
        {"session_id": "b", "timestamp": 1500, **body},
    ]
    trace = load_trace(write(tmp_path / "a.jsonl", rows))
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.at[2] > 2.0 + 0.5  # the delay, and some time for the first turn itself


def test_block_size_can_be_said(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [1, 2]}]
    assert load_trace(write(tmp_path / "t.jsonl", rows), block_size=32).block_size == 32


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": 1e300}, "timestamp"),
        ({"timestamp": "soon"}, "timestamp"),
        ({"input_length": None}, "input_length"),
        ({"hash_ids": None}, "hash_ids"),
        ({"timestamp": None}, "timestamp"),
        ({"hash_ids": [1]}, "hash_ids has 1 entries"),
        ({"hash_ids": [1, -2]}, "hash_ids"),
        ({"hash_ids": "no"}, "hash_ids"),
        ({"input_length": 1 << 40}, "input_length"),
        ({"input_length": 0, "hash_ids": []}, "allowed: 1 token or more"),
        ({"chat_id": 3}, "one file holds one format"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    rows = [MOONCAKE[0], {k: v for k, v in (MOONCAKE[0] | row).items() if v is not None}]
    path = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert problem in str(caught.value)


def test_a_negative_delay_is_named(tmp_path: Path) -> None:
    body = {"session_id": "a", "input_length": 500, "output_length": 100, "hash_ids": [1]}
    path = write(tmp_path / "a.jsonl", [{"timestamp": 0, **body}, {"delay": -5, **body}])
    with pytest.raises(TraceError, match=r"a\.jsonl:2: .*delay"):
        load_trace(path)


def test_sessions_without_time_stamps_come_as_their_answers_let_them(tmp_path: Path) -> None:
    body = {"input_length": 500, "output_length": 100, "hash_ids": [1]}
    rows = [
        {"session_id": "a", **body},
        {"session_id": "a", "delay": 2000, **body},
        {"session_id": "b", "delay": 500, **body},
        {"session_id": "a", **body},
        {"session_id": "b", "timestamp": None, "delay": None, **body},
    ]
    trace = load_trace(write(tmp_path / "a.jsonl", rows))
    assert trace.session.tolist() == [0, 1, 1, 0, 0]
    answer = 500 / 20_000 + 100 * 0.02
    assert trace.at.tolist() == pytest.approx(
        [0.0, 0.5, 0.5 + answer, 2.0 + answer, 2.0 + 2 * answer]
    )


@pytest.mark.parametrize(
    "parents",
    [
        {1: -1, 2: 1, 3: 2, 7: -1},
        {3: 2, 2: 1, 1: -1, 7: -1},
        {3: 2, 1: -1, 7: None, 2: 1},
        {2: 1, 7: 7, 1: None, 3: 2},
        {3: 1, 2: 1, 7: -1, 1: 3},  # a ring
    ],
)
def test_a_bailian_child_may_stand_before_its_parent(
    tmp_path: Path, parents: dict[int, int | None]
) -> None:
    rows = [
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": 60.0 - n, "input_length": 40,
         "output_length": 3, "hash_ids": [1, 2, 3]}
        for n, (chat, parent) in enumerate(parents.items())
    ]  # fmt: skip
    trace = load_trace(write(tmp_path / "q.jsonl", rows))
    session = dict(zip([*parents][::-1], trace.session.tolist(), strict=True))
    assert session[1] == session[2] == session[3] != session[7]
    assert sorted(set(session.values())) == [0, 1]
    assert int(trace.last.sum()) == 2


def test_children_of_a_parent_that_the_file_lacks_are_one_session(tmp_path: Path) -> None:
    rows = [
        {"chat_id": chat, "parent_chat_id": 99, "timestamp": chat, "input_length": 40,
         "output_length": 3, "hash_ids": [1, 2, 3]}
        for chat in (5, 6)
    ]  # fmt: skip
    assert load_trace(write(tmp_path / "q.jsonl", rows)).session.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
@pytest.mark.parametrize("rows", [MOONCAKE, [{"kvgraph_trace": 1, "block_size": 512}]])
def test_a_byte_order_mark_is_left_out(tmp_path: Path, name: str, rows: list[Any]) -> None:
    if rows is not MOONCAKE:
        rows = [*rows, {"at": 0, "input_length": 1024, "hash_ids": [1, 2]}]
    text = b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, rows)).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert len(load_trace(path)) == len([row for row in rows if "hash_ids" in row])
    path.write_bytes(b"\xef\xbb\xbf\n" + text.removeprefix(b"\xef\xbb\xbf"))
    assert len(load_trace(path)) > 0
    path.write_bytes(text + b"\r\n" + text)  # one file appended to the other
    assert rows is not MOONCAKE or len(load_trace(path)) == 2 * len(rows)


def test_what_is_null_is_absent_and_what_a_table_writes_is_a_number(tmp_path: Path) -> None:
    rows = [
        {**MOONCAKE[0], "output_length": None, "session_id": None, "delay": None, "turn": None},
        {**MOONCAKE[1], "output_length": 9.0, "input_length": "1500", "ended": None,
         "output_hash_ids": None, "layers": None, "seconds": None},
    ]  # fmt: skip
    trace = load_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.output_tokens.tolist() == [0, 9]
    assert trace.input_tokens.tolist() == [1024, 1500]
    with pytest.raises(TraceError, match=r"t\.jsonl:1: .*output_length"):
        load_trace(write(tmp_path / "t.jsonl", [{**MOONCAKE[0], "output_length": 1.5}]))


@pytest.mark.parametrize("nothing", ["NaN", '""', "null"])
def test_a_tables_empty_cells_are_null(tmp_path: Path, nothing: str) -> None:
    head = '{"session_id": "a", "timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]'
    path = tmp_path / "t.jsonl"
    path.write_text(f'{head}, "delay": {nothing}, "output_length":{nothing} }}\n{head}}}\n')
    assert load_trace(path).output_tokens.tolist() == [0, 0]
    path.write_text(f'{{"timestamp": 0, "input_length": {nothing}, "hash_ids": [1, 2]}}\n')
    with pytest.raises(TraceError, match=r"t\.jsonl:1: .*"):
        load_trace(path)


def test_a_request_without_a_session_is_one_of_its_own(tmp_path: Path) -> None:
    """aiperf reads such lines as sessions of a single turn; tables write empty cells."""
    body = {"input_length": 500, "hash_ids": [1]}
    for nobody in ({}, {"session_id": ""}, {"session_id": None}):
        single = {**body, **nobody}
        for first in ({"timestamp": 1, **single}, {"delay": 0, **single}):
            rows = [first, {**body, "session_id": "a", "delay": 5}, {"timestamp": 2, **single}]
            trace = load_trace(write(tmp_path / "t.jsonl", rows))
            assert len(set(trace.session.tolist())) == 3
    alone = [{"timestamp": n, "session_id": "", **MOONCAKE[n]} for n in range(3)]
    plain = load_trace(write(tmp_path / "p.jsonl", MOONCAKE)).session
    assert load_trace(write(tmp_path / "a.jsonl", alone)).session.tolist() == plain.tolist()


LINES = [json.dumps(row) for row in MOONCAKE]
WRITTEN = {
    "commas": ",\n".join([*LINES, ""]).encode(),
    "array": json.dumps(MOONCAKE).encode(),
    "array of lines": ("[\n" + ",\n".join(LINES) + "\n]\n").encode(),
    "indented array": b"\xef\xbb\xbf" + json.dumps(MOONCAKE, indent=2).encode(),
    "UTF-16": "\r\n".join(LINES).encode("utf-16"),
    "UTF-16, big end first": b"\xfe\xff" + "\n".join(LINES).encode("utf-16-be"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("data", WRITTEN.values(), ids=WRITTEN)
def test_it_may_be_an_array_or_utf16(tmp_path: Path, data: bytes, zipped: bool) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(data) if zipped else data)
    trace = load_trace(path)
    assert trace.input_tokens.tolist() == [1024, 600, 1500]


def test_much_of_utf16_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes("\n".join(line[:-1] + ', "é𝄞": 0}' for line in LINES * 500).encode("utf-16"))
    assert len(load_trace(path)) == 3 * 500
    path.write_bytes(path.read_bytes()[:-3] + b"\x00\xdc")
    with pytest.raises(TraceError, match="utf-16"):
        load_trace(path)


def test_an_array_is_bounded_and_its_bad_entry_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([*MOONCAKE, {"chat_id": 1}]))
    with pytest.raises(TraceError, match=r"t\.json:4: "):
        load_trace(path)
    monkeypatch.setattr(reader, "MAX_ARRAY", 100)
    with pytest.raises(TraceError, match="a line each"):
        load_trace(path)


@pytest.mark.parametrize(
    ("begins", "name"),
    [(b"(\xb5/\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"BZh9", "bzip2"), (b"PK\3\4", "zip")],
)
def test_what_packed_it_is_named(tmp_path: Path, begins: bytes, name: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(begins + b"x" * 9)
    with pytest.raises(TraceError, match=f"is packed by {name}; allowed: gzip"):
        load_trace(path)


@pytest.mark.parametrize("text", ["", "\n\n", '{"kvgraph_trace":1,"block_size":16}\n'])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match="empty"):
        load_trace(path)


@pytest.mark.parametrize("data", [b"no json", b"\xff\xfe{", b"[" * 100_000, b'{"a": 1}', b"3"])
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=":1: "):
        load_trace(path)


def test_a_truncated_gzip_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl.gz", MOONCAKE * 500)
    data = path.read_bytes()
    for cut in (len(data) // 2, len(data) - 3):
        path.write_bytes(data[:cut])
        with pytest.raises(TraceError, match="truncated"):
            load_trace(path)
    path.write_bytes(data[:20] + bytes([data[20] ^ 0xFF]) + data[21:])
    with pytest.raises(TraceError, match=str(path)):
        load_trace(path)


def test_an_endless_line_costs_no_more_than_the_longest_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 1000)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000))
    with pytest.raises(TraceError, match=":1: the line is longer than 1000 bytes"):
        load_trace(path)


@pytest.mark.parametrize("row", [MOONCAKE[0], {"timestamp": 0, "input_length": 1, "hash_ids": []}])
def test_a_bomb_of_many_lines_costs_no_more_than_the_most_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    monkeypatch.setattr(reader, "MAX_REFERENCES", 1000)
    path = write(tmp_path / "bomb.jsonl.gz", [row] * 5000)
    with pytest.raises(TraceError, match=r":\d+: more than 1,000"):
        load_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.jsonl"):
        load_trace(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_full_disk_ends_the_log_and_not_the_sidecar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    log = Recorder(tmp_path / name)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    log(
        "e",
        [RequestStarted("r", pack(7), 20, 0, 16), RequestFinished("r", pack(7), 20, 21, "stop")],
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file may grow any more
    try:
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"the log is cut short: {tmp_path / name}" in caplog.text


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
    assert said.waiting.tolist() == [1, 0, -1]
    assert said.ended.tolist() == [False, False, True]
    assert said.expected_return_s[0] == 4.5
    assert np.isnan(said.expected_return_s[1:]).all()
    assert said.layers == (((SourceLayer.CAPABILITIES, 0, 16), (SourceLayer.RULES, 16, 20)), (), ())
    assert said.tenant.tolist() == [0, -1, -1]
    assert said.anything


def test_a_part_of_a_trace_keeps_what_was_said_of_it(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, line(1.0, [1]), line(2.0, [1, 2], **TOLD))
    said = trace.head(0.5).said
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
        ({"layers": [["rules", 0, 1]] * (MAX_SEGMENTS + 1)}, "layers"),
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
    assert said.waiting.tolist() == [1, 0, -1]
    assert said.tenant.tolist() == [0, 0, 0]


def test_default_is_what_a_sidecar_runs_unconfigured() -> None:
    config = Config()
    live = config.policy.policy(config.score.weights())
    assert graph_policies()["default"] == live.name == DEFAULT
    assert chosen_arms(["default", "default+hints"]) == ["default", "default+hints"]


def test_all_runs_no_policy_twice() -> None:
    names = arm_names()
    assert "default" not in names
    assert [name for name in names if name.endswith("+hints")] == [f"{DEFAULT}+hints"]
    assert [names.count(name) for name in POLICIES] == [1] * len(POLICIES)
    assert len(names) == len(set(names))
