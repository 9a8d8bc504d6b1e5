"""Trace readers: every format means what it says, and bad input is named by file and line."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import kvgraph
from kvgraph.advisor import service
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.policies.registry import DEFAULT, POLICIES
from kvgraph.advisor.replay import reader, recorder
from kvgraph.advisor.replay import reader as lines
from kvgraph.advisor.replay.arms import (
    BY_DEFAULT,
    LAYERS,
    Settings,
    arm_names,
    chosen_arms,
    graph_policies,
    run_arm,
)
from kvgraph.advisor.replay.graph_order import TraceEvents
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorder import Recorder
from kvgraph.advisor.replay.trace import Trace, TraceError
from kvgraph.graph.types import Authority, SourceLayer
from kvgraph.graph.wire.events import MAX_SEGMENTS, RequestFinished, RequestStarted, Segment
from msgspec.structs import replace
from wire_keys import pack

Loaded, Refused = Callable[..., Trace], Callable[..., None]


def row(at: float, *ids: int, **more: Any) -> dict[str, Any]:
    """A request of full blocks of 512 tokens, as Mooncake writes them."""
    size = {"input_length": 512 * len(ids), "output_length": 1, "hash_ids": [*ids]}
    return {"timestamp": at, **size, **more}


MOONCAKE = [
    row(0, 7, 8, output_length=5),
    row(3000, 7, 8, 9, input_length=1500, output_length=9),
    row(1000, 7, 10, input_length=600),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(each) + "\n" for each in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Trace]:
    """Reads a trace of these lines."""

    def load(*rows: dict[str, Any], name: str = "t.jsonl") -> Trace:
        return load_trace(write(tmp_path / name, [*rows]))

    return load


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., None]:
    """Fails unless a trace of these lines, or this file, is refused in these words."""

    def refuse(said: str, *rows: dict[str, Any], data: bytes | None = None) -> None:
        path = write(tmp_path / "t.jsonl", [*rows])
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(TraceError, match=said):
            load_trace(path)

    return refuse


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_is_sorted_by_time_and_sessions_come_from_chains(
    loaded: Loaded, name: str
) -> None:
    trace = loaded(*MOONCAKE, name=name)
    assert trace.block_size == 512
    assert trace.at.tolist() == [0.0, 1.0, 3.0]
    assert [len(chain) for chain in trace.chains()] == [2, 2, 3]
    assert trace.full.tolist() == [2, 1, 2]
    # The third extends the first; the second only shares the first block with it.
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.last.tolist() == [False, True, True]
    assert trace.turns().tolist() == [0, 0, 1]
    assert not trace.has_sessions


def test_a_prefix_that_several_sessions_share_is_the_end_of_nobodys_turn(loaded: Loaded) -> None:
    chains = [[1, 2], [1, 3], [1], [1, 4], [1, 2, 5]]
    trace = loaded(*(row(at, *ids) for at, ids in enumerate(chains)))
    assert trace.session.tolist() == [0, 1, 2, 3, 0]


def test_equal_hashes_after_different_prefixes_are_different_blocks(loaded: Loaded) -> None:
    trace = loaded(row(0, 1, 5), row(1, 2, 5), row(2, 3, 3))
    assert trace.num_blocks == 6
    assert len(np.unique(trace.keys())) == 6


def asked(chat: int, parent: int | None, at: float) -> dict[str, Any]:
    """A line as Bailian writes it."""
    names = {"chat_id": chat, "parent_chat_id": parent, "type": "text", "turn": 1}
    return row(at, 1, 2, 3, input_length=40, output_length=3, **names)


def test_bailian_conversations_follow_their_parents(loaded: Loaded) -> None:
    trace = loaded(*(asked(n, parent, n * 1.5) for n, parent in enumerate([-1, -1, 0, 2])))
    assert (trace.block_size, trace.has_sessions) == (16, True)
    assert trace.at.tolist() == [0.0, 1.5, 3.0, 4.5]
    first, other, second, third = trace.session.tolist()
    assert first == second == third != other


BODY = {"input_length": 500, "output_length": 100, "hash_ids": [1]}


def test_aiperf_delays_count_from_the_end_of_the_turn_before(loaded: Loaded) -> None:
    trace = loaded(
        {"session_id": "a", "timestamp": 1000, **BODY},
        {"session_id": "a", "delay": 2000, **BODY},
        {"session_id": "b", "timestamp": 1500, **BODY},
    )
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.at[2] > 2.0 + 0.5  # the delay, and some time for the first turn itself


def test_block_size_can_be_said(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [row(0, 1, 2, input_length=64)])
    assert load_trace(path, block_size=32).block_size == 32


@pytest.mark.parametrize(
    ("wrong", "problem"),
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
        ({"session_id": "a", "delay": -5}, "delay"),
        ({"waiting_for_tool": True}, "waiting_for_tool does not belong"),
    ],
)
def test_a_bad_line_is_named(
    refused: Refused, tmp_path: Path, wrong: dict[str, Any], problem: str
) -> None:
    bad = {key: value for key, value in (MOONCAKE[0] | wrong).items() if value is not None}
    refused(rf"^{tmp_path}/t\.jsonl:2: .*{problem}", MOONCAKE[0], bad)


def test_sessions_without_time_stamps_come_as_their_answers_let_them(loaded: Loaded) -> None:
    trace = loaded(
        {"session_id": "a", **BODY},
        {"session_id": "a", "delay": 2000, **BODY},
        {"session_id": "b", "delay": 500, **BODY},
        {"session_id": "a", **BODY},
        {"session_id": "b", "timestamp": None, "delay": None, **BODY},
        {"delay": 4000, **BODY},  # a session of a single turn
    )
    assert trace.session.tolist() == [0, 1, 1, 2, 0, 0]
    answer = 500 / 20_000 + 100 * 0.02
    assert trace.at.tolist() == pytest.approx(
        [0.0, 0.5, 0.5 + answer, 4.0, 2.0 + answer, 2.0 + 2 * answer]
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
    loaded: Loaded, parents: dict[int, int | None]
) -> None:
    trace = loaded(*(asked(*each, 60.0 - n) for n, each in enumerate(parents.items())))
    session = dict(zip([*parents][::-1], trace.session.tolist(), strict=True))
    assert session[1] == session[2] == session[3] != session[7]
    assert sorted(set(session.values())) == [0, 1]
    assert int(trace.last.sum()) == 2


def test_children_of_a_parent_that_the_file_lacks_are_one_session(loaded: Loaded) -> None:
    assert loaded(asked(5, 99, 5), asked(6, 99, 6)).session.tolist() == [0, 0]


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


def test_what_is_null_is_absent_and_what_a_table_writes_is_a_number(
    loaded: Loaded, refused: Refused
) -> None:
    absent = dict.fromkeys(("ended", "output_hash_ids", "layers", "seconds"))
    trace = loaded(
        {**MOONCAKE[0], "output_length": None, "session_id": None, "delay": None, "turn": None},
        {**MOONCAKE[1], "output_length": 9.0, "input_length": "1500", **absent},
    )
    assert trace.output_tokens.tolist() == [0, 9]
    assert trace.input_tokens.tolist() == [1024, 1500]
    refused(r"t\.jsonl:1: .*output_length", {**MOONCAKE[0], "output_length": 1.5})


@pytest.mark.parametrize("nothing", ["NaN", '""', "null"])
def test_a_tables_empty_cells_are_null(tmp_path: Path, refused: Refused, nothing: str) -> None:
    head = '{"session_id": "a", "timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]'
    path = tmp_path / "t.jsonl"
    path.write_text(f'{head}, "delay": {nothing}, "output_length":{nothing} }}\n{head}}}\n')
    assert load_trace(path).output_tokens.tolist() == [0, 0]
    wrong = f'{{"timestamp": 0, "input_length": {nothing}, "hash_ids": [1, 2]}}\n'
    refused(r"t\.jsonl:1: .*", data=wrong.encode())


@pytest.mark.parametrize("nobody", [{}, {"session_id": ""}, {"session_id": None}])
@pytest.mark.parametrize("first", [{"timestamp": 1}, {"delay": 0}])
def test_a_request_without_a_session_is_one_of_its_own(
    loaded: Loaded, nobody: dict[str, Any], first: dict[str, Any]
) -> None:
    """aiperf reads such lines as sessions of a single turn; tables write empty cells."""
    single = {"input_length": 500, "hash_ids": [1], **nobody}
    named = {**single, "session_id": "a", "delay": 5}
    trace = loaded({**first, **single}, named, {"timestamp": 2, **single})
    assert len(set(trace.session.tolist())) == 3


def test_a_trace_of_empty_names_is_one_without_names(loaded: Loaded) -> None:
    plain = loaded(*MOONCAKE).session.tolist()
    assert loaded(*({"session_id": "", **each} for each in MOONCAKE)).session.tolist() == plain


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


ZIPPED = gzip.compress("\n".join(LINES * 500).encode())
NO_TRACES = {
    "zstd": (b"(\xb5/\xfd", "is packed by zstd; allowed: gzip"),
    "xz": (b"\xfd7zXZ\0", "is packed by xz; allowed: gzip"),
    "bzip2": (b"BZh9", "is packed by bzip2; allowed: gzip"),
    "zip": (b"PK\3\4", "is packed by zip; allowed: gzip"),
    "nothing": (b"", "empty"),
    "empty lines": (b"\n\n", "empty"),
    "a head alone": (b'{"kvgraph_trace":1,"block_size":16}\n', "empty"),
    "no JSON": (b"no json", ":1: "),
    "no text": (b"\xff\xfe{", ":1: "),
    "nested deep": (b"[" * 100_000, ":1: "),
    "another object": (b'{"a": 1}', ":1: "),
    "a number": (b"3", ":1: "),
    "half of a gzip": (ZIPPED[: len(ZIPPED) // 2], "truncated"),
    "a gzip without its end": (ZIPPED[:-3], "truncated"),
    "a gzip with a wrong byte": (ZIPPED[:20] + bytes([ZIPPED[20] ^ 0xFF]) + ZIPPED[21:], "t.jsonl"),
}


@pytest.mark.parametrize(("data", "said"), NO_TRACES.values(), ids=NO_TRACES)
def test_what_is_no_trace_is_refused_in_words(refused: Refused, data: bytes, said: str) -> None:
    refused(said, data=data)


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


def test_a_recording_that_a_full_disk_ended_is_called_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "log.jsonl"
    out.symlink_to("/dev/full")
    monkeypatch.setattr(recorder, "new_file", lambda path: path.open("w"))
    run = [RequestStarted("r", pack(7), 20, 0, 16), RequestFinished("r", pack(7), 20, 21, "stop")]
    monkeypatch.setattr(service, "serve", lambda *given: given[-1]("e", run))
    done = kvgraph("record", str(out))
    assert done.returncode != 0
    assert f"at most 1 requests written to {out}" in done.stderr
    assert f"{out} is cut short" in done.stderr


READ = BY_DEFAULT + LAYERS

HEADER = {"kvgraph_trace": 1, "block_size": 16}


def line(at: float, blocks: list[int], session: str | None = "a", **said: Any) -> dict[str, Any]:
    body = {"at": at, "input_length": 16 * len(blocks), "output_length": 3, "hash_ids": blocks}
    return {**body, "session": session, **said}


TOLD = {
    "waiting_for_tool": True,
    "expected_return_s": 4.5,
    "layers": [["capabilities", 0, 16], ["rules", 16, 20]],
    "tenant": "acme",
    "seconds": 2.0,
}


def test_what_callers_said_is_read_in_order_of_arrival(loaded: Loaded) -> None:
    trace = loaded(
        HEADER,
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


def test_a_part_of_a_trace_keeps_what_was_said_of_it(loaded: Loaded) -> None:
    trace = loaded(HEADER, line(1.0, [1]), line(2.0, [1, 2], **TOLD))
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
    refused: Refused, said: dict[str, Any], problem: str
) -> None:
    refused(rf"t\.jsonl:2: .*{problem}", HEADER, line(1.0, [1], **said))


LAYERS_TOLD = (Segment(3, 0, 16), Segment(2, 16, 20))
LAYERS_READ = tuple(replace(each, authority=int(Authority.INFERRED)) for each in LAYERS_TOLD)


@pytest.mark.parametrize(
    ("reads", "segments", "waiting"),
    [({}, (), None), ({"layers": True}, LAYERS_READ, None), ({"stops": True}, (), True)],
    ids=["nothing", "layers", "stops"],
)
def test_without_hints_an_engine_reads_what_it_is_to_read_and_nothing_else(
    loaded: Loaded, reads: dict[str, bool], segments: tuple[Segment, ...], waiting: bool | None
) -> None:
    trace = loaded(HEADER, line(1.0, [1, 2], **TOLD), line(2.0, [1, 2, 3], ended=True))
    events = TraceEvents(trace, hints=False, **reads)
    for request, parts, stop in ((0, segments, waiting), (1, (), None)):
        started, finished = events.started(request, 0), events.finished(request, 5.0)
        assert (started.session, started.tenant, started.segments) == (None, None, parts)
        assert (finished.session, finished.tenant) == (None, None)
        assert (finished.waiting_for_tool, finished.expected_return_s) == (stop, None)
        assert not finished.session_ended


@pytest.mark.parametrize("layers", [False, True])
def test_with_hints_callers_say_what_the_trace_says(loaded: Loaded, layers: bool) -> None:
    trace = loaded(HEADER, line(1.0, [1, 2], **TOLD), line(5.0, [1, 2, 3]))
    trace_events = TraceEvents(trace, hints=True, layers=layers)
    started, finished = trace_events.started(0, 0), trace_events.finished(0, 0.0)
    assert started.segments == LAYERS_TOLD
    assert started.tenant == finished.tenant == "t0"
    assert started.session == finished.session == "s0"
    assert finished.waiting_for_tool is True
    # Its request took two seconds, and takes none here: the pause begins when it really did.
    assert finished.expected_return_s == pytest.approx(6.5)
    assert trace_events.finished(0, 30.0).expected_return_s == pytest.approx(4.5)
    assert not trace_events.finished(1, 9.0).session_ended, "the trace did not say so"


def test_a_system_text_that_is_read_outlives_others_prompts(loaded: Loaded) -> None:
    head = {"layers": [["rules", 0, 32]]}
    chats = [line(10.0 + i, [1, 2, 10 + i], **head) for i in range(3)]
    others = [line(20.0 + i, [100 + 10 * i + j for j in range(10)], None) for i in range(12)]
    trace = loaded(HEADER, *chats, *others, line(60.0, [1, 2, 20], **head))
    found = {name: run_arm(name, trace, 48, Settings())[-1] for name in ("lru", "default", READ)}
    assert found == {"lru": 0, "default": 0, READ: 2}


def test_with_hints_a_trace_that_says_nothing_knows_last_turns(loaded: Loaded) -> None:
    trace = loaded(HEADER, line(1.0, [1, 2]), line(2.0, [1, 2, 3]))
    events = TraceEvents(trace, hints=True)
    assert [events.finished(each, 0.0).session_ended for each in (0, 1)] == [False, True]


def test_unnamed_sessions_may_still_say_why_answers_ended(loaded: Loaded) -> None:
    trace = loaded(HEADER, line(1.0, [1, 2], waiting_for_tool=False)).unnamed()
    finished = TraceEvents(trace, hints=True).finished(0, 0.0)
    assert finished.session is None
    assert finished.waiting_for_tool is False


def test_the_recorder_writes_what_callers_say_and_no_name(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    recorder = Recorder(path, clock=lambda: 0.0, secret=b"k" * 32)
    hashes = pack(123456789, 987654321)
    segments = (Segment(2, 0, 16, None, "secret.md"), Segment(7, 16, 99))
    for request, waiting in enumerate((True, False, None)):
        known = (f"r{request}", hashes, 32)
        recorder("e", [RequestStarted(*known, 0, 16, "agent", "acme", segments)])
        expected = 3.5 if waiting else None
        finished = RequestFinished(*known, 40, "stop", "agent", "acme", waiting, expected)
        recorder("e", [finished])
    recorder.close()
    text = path.read_text()
    assert not any(name in text for name in ("agent", "acme", "secret", "123456789", "987654321"))
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
