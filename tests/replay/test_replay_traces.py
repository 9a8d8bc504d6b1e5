"""Trace readers: every format means what it says, and bad input is named by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.replay import reader
from kvgraph.advisor.replay import reader as lines
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.trace import TraceError

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
        ({"session_id": "s"}, "one file holds one format"),
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
