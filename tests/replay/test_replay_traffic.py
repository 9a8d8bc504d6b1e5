"""Recorded agent sessions, laid over users."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_line import kvgraph
from kvgraph.advisor.replay.closed import runs_for
from kvgraph.advisor.replay.fleet_traffic import (
    MAGNITUDE,
    MAX_GAP_S,
    BlockNumbers,
    FleetRequest,
    Signals,
    in_harnesses,
    lay_over_users,
    trace_lines,
    write_trace,
)
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorded_sessions import Session, read_session, read_sessions
from kvgraph.advisor.replay.trace import ReplayError, TraceError

Json = dict[str, Any]


def request(t: float, tokens: int, first: int = 0, **more: Any) -> Json:
    """A request whose blocks are numbered from ``first``."""
    ids = list(range(first, first + tokens // 64))
    said = {"out": 100, "stop": "tool_use", "api_time": 2.0, "input_types": ["tool_result"]}
    return {"t": t, "type": "n", "in": tokens, "hash_ids": ids, **said, **more}


def weka(requests: Sequence[Json], **more: Any) -> Json:
    return {
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 1024,
        "system_tokens": 600,
        "requests": list(requests),
        **more,
    }


def write(path: Path, content: Json) -> Path:
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


Made = Callable[..., Session]


@pytest.fixture
def session(tmp_path: Path) -> Made:
    """Reads a session of these requests."""

    def read(requests: Sequence[Json], name: str = "a", **more: Any) -> Session:
        return read_session(write(tmp_path / f"{name}.json", weka(requests, **more)))

    return read


def work(turns: int = 4) -> list[Json]:
    """A session that grows by a block of 512 tokens a turn, a minute each; the last ends it."""
    grown = [request(60.0 * i, 2048 + 512 * i) for i in range(turns)]
    grown[-1]["stop"] = "end_turn"
    return grown


def lines_of(
    sessions: Sequence[Session], signals: Signals = Signals.NONE, **options: bool
) -> list[Json]:
    requests = lay_over_users(sessions, 2, 4 * 3600.0, 1)
    return list(trace_lines(requests, 512, signals, 1, **options))[1:]


def test_reads_a_directory_gzipped_or_not(tmp_path: Path) -> None:
    write(tmp_path / "b.json.gz", weka(work()))
    write(tmp_path / "a.json", weka(work()))
    (tmp_path / "notes.txt").write_text("not a session")
    found = read_sessions(tmp_path)
    assert [each.name for each in found] == ["a", "b"]
    assert [turn.input_tokens for turn in found[0].turns] == [2048, 2560, 3072, 3584]
    assert found[0].turns[0].input_types == ("tool_result",)
    assert found[0].turns[0].api_s == 2.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (weka([]), "requests: it holds no request"),
        (weka([{"t": 0, "hash_ids": []}]), r"requests\[0\].in is missing"),
        (weka([{"t": 0, "in": 64}]), r"requests\[0\].hash_ids is missing"),
        (weka([request(-1.0, 640)]), "requests.*t`"),
        (weka([request(0.0, 640, hash_ids=[1, 2])]), r"requests\[0\].hash_ids has 2 entries"),
        (weka([request(0.0, 64, hash_ids=[-1])]), "hash_ids"),
        (weka([request(0.0, 64, hash_ids=[1 << 64])]), "hash_ids"),
        (weka([request(0.0, 64, hash_ids=["x"])]), "hash_ids"),
        (weka([request(0.0, 128, hash_ids=[5, 5])]), "5 follows two different prefixes"),
        (weka([request(0.0, 128), request(1.0, 128, 1)]), "1 follows two different prefixes"),
        (weka([request(0.0, 640, **{"out": 1 << 40})]), "out"),
        (weka([request(0.0, 640, stop="x" * 100)]), "stop"),
        (weka(work(), block_size=0), "block_size"),
        (weka(work(), hash_id_scope="planet"), "allowed: local, global"),
        ({"block_size": 64}, "requests"),
        (weka([{"type": "subagent", "t": 0, "requests": []}]), "requests"),
    ],
)
def test_hostile_sessions_name_file_and_field(tmp_path: Path, content: Json, said: str) -> None:
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(TraceError, match=said) as caught:
        read_session(path)
    assert str(path) in str(caught.value)


def nested(depth: int) -> Json:
    inner: Json = request(0.0, 640)
    for _ in range(depth):
        inner = {"type": "subagent", "t": 0, "requests": [inner, request(0.0, 640)]}
    return weka([request(0.0, 640), inner])


WHOLE = gzip.compress(json.dumps(weka(work())).encode())
DAMAGED = {
    "nothing": b"",
    "no end": b"{",
    "no text": b"\xff\xfe",
    "no session": b'{"t": NaN}',
    "a gzip without its end": WHOLE[:-20],
    "no gzip": b"\x1f\x8b" + b"junk" * 100,
    "nested deep": b"[" * 100_000,
    "subagents of subagents": json.dumps(nested(100)).encode(),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_name_the_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.json.gz"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"bad\.json\.gz"):
        read_session(path)


def test_a_gzip_bomb_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgraph.advisor.replay.recorded_sessions.MAX_FILE", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (8 << 20)))
    with pytest.raises(TraceError, match="longer than"):
        read_session(path)


def test_a_session_of_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json.gz", weka(work()))
    write(tmp_path / "a.json", weka(work()))
    with pytest.raises(TraceError, match="second file"):
        read_sessions(tmp_path)


def test_the_seed_fixes_the_fleet(session: Made, tmp_path: Path) -> None:
    sessions = [session(work(3 + i), f"s{i}") for i in range(6)]

    def files(seed: int) -> bytes:
        requests = lay_over_users(sessions, 3, 3600.0, seed)
        write_trace(trace_lines(requests, 512, Signals.ALL, seed), tmp_path / "fleet.jsonl.gz")
        return (tmp_path / "fleet.jsonl.gz").read_bytes()

    assert files(1) == files(1)
    assert files(1) != files(2)


def test_users_work_in_parallel_one_session_after_another(session: Made) -> None:
    sessions = [session(work(5), f"s{i}") for i in range(6)]
    requests = lay_over_users(sessions, 3, 2 * 3600.0, 1)
    assert [r.at for r in requests] == sorted(r.at for r in requests)
    for user in range(3):
        own = [r.run for r in requests if r.user == user]
        assert own
        borders = sum(a != b for a, b in pairwise(own))
        assert borders + 1 == len(set(own)), "a session is played as a whole"
    first_lap = {r.run for r in requests if "@" not in r.run}
    assert first_lap == {each.name for each in sessions}


def test_long_pauses_are_cut(session: Made) -> None:
    long = session([request(0.0, 2048), request(90_000.0, 2560)])
    first, second = lay_over_users([long], 1, 2 * MAX_GAP_S + 1, 1)[:2]
    assert second.at - first.at == pytest.approx(MAX_GAP_S)
    assert first.returns_s == MAX_GAP_S
    assert first.pause_s == MAX_GAP_S - 2.0


def test_the_horizon_leaves_out_what_comes_later_and_ends_nothing(session: Made) -> None:
    sessions = [session(work(200))]
    requests = lay_over_users(sessions, 1, MAX_GAP_S + 600.0, 1)
    assert 0 < len(requests) < 200
    assert all(r.at < MAX_GAP_S + 600.0 for r in requests)
    lines = list(trace_lines(requests, 512, Signals.ALL, 1))[1:]
    assert not any("ended" in line for line in lines)
    assert lines[-1]["waiting_for_tool"]


@pytest.mark.parametrize(("users", "hours"), [(0, 1.0), (1, 0.0)])
def test_a_fleet_of_nobody_is_refused(session: Made, users: int, hours: float) -> None:
    with pytest.raises(ReplayError):
        lay_over_users([session(work())], users, hours, 1)


def test_a_fleet_without_requests_is_not_written(session: Made, tmp_path: Path) -> None:
    session(work())
    out = tmp_path / "fleet.jsonl"
    done = traffic(tmp_path, out, "--users", "1", "--hours", "0.001")
    assert "--hours 0.001: no user has begun by then" in done.stderr
    assert not out.exists()


def traffic(sessions: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return kvgraph("traffic", str(sessions), "-o", str(out), *words)


def play(each: Session, run: str | None = None, index: int = 0) -> FleetRequest:
    return FleetRequest(0.0, 0, run or each.name, run or each.name, each, index, None)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ((1024, 600), (1024, 600), 3),
        ((1024, 600), (1024, 700), 2),
        ((1024, 600), (1025, 600), 0),
        ((1000, 600), (1000, 700), 1),  # a block that both share belongs to the rules
    ],
)
def test_sessions_share_tools_of_equal_length_and_then_the_system_prompt(
    session: Made, one: tuple[int, int], other: tuple[int, int], common: int
) -> None:
    numbers, chains = BlockNumbers(512), []
    for name, (tools, system) in (("a", one), ("b", other)):
        made = session(work(), name, tool_tokens=tools, system_tokens=system)
        chains.append(numbers.prompt(play(made)))
    assert [len(chain) for chain in chains] == [4, 4]
    assert chains[0][:common] == chains[1][:common]
    assert not set(chains[0][common:]) & set(chains[1][common:])


def test_a_stated_number_of_harnesses_is_that_many_heads(session: Made) -> None:
    sizes = [(1024, 600), (1000, 536), (700, 1000), (1536, 0), (512, 100), (1024, 700), (900, 900)]
    sessions = [
        session(work(), f"s{i}", tool_tokens=tools, system_tokens=system)
        for i, (tools, system) in enumerate(sizes)
    ]
    for count in (1, 2, 3, 7):
        dealt = in_harnesses(sessions, count, 1)
        assert dealt == in_harnesses(sessions, count, 1)
        numbers = BlockNumbers(512)
        chains = [numbers.prompt(play(each)) for each in dealt]
        assert len({chain[0] for chain in chains}) == count
        assert len({each.harness for each in dealt}) == count
        for each, was, chain in zip(dealt, sessions, chains, strict=True):
            assert each.turns == was.turns
            own = was.tool_tokens + was.system_tokens
            assert each.tool_tokens + each.system_tokens <= own
            for other, beside in zip(dealt, chains, strict=True):
                heads = (x.tool_tokens + x.system_tokens for x in (each, other))
                common = min(heads) // 512 if each.harness == other.harness else 0
                assert chain is beside or set(chain) & set(beside) == set(chain[:common])
    assert in_harnesses(sessions, 2, 1) != in_harnesses(sessions, 2, 2)


def test_no_more_harnesses_than_sessions(session: Made) -> None:
    only = [session(work())]
    for count in (0, 2):
        with pytest.raises(ReplayError, match=f"--harnesses {count}: allowed: 1 to 1"):
            in_harnesses(only, count, 1)


def test_a_session_played_again_shares_its_head_only(session: Made) -> None:
    each = session(work())
    numbers = BlockNumbers(512)
    first, again = numbers.prompt(play(each, "a")), numbers.prompt(play(each, "a@2"))
    assert first[:3] == again[:3]
    assert not set(first[3:]) & set(again[3:])


def test_numbers_have_sixty_four_bits_and_what_is_null_is_absent(session: Made) -> None:
    ids = [(1 << 64) - 1, 1 << 63, 13835058055282163712]
    asked = {"t": 0, "in": 192.0, "out": None, "type": None, "stop": None, "hash_ids": ids}
    found = session([asked], tool_tokens=None, hash_id_scope=None)
    assert found.turns[0].hash_ids.tolist() == ids
    assert (found.turns[0].output_tokens, found.tool_tokens, found.is_global) == (0, 0, False)
    numbers = BlockNumbers(64)
    assert numbers.prompt(play(found)) == [0, 1, 2]


def test_a_tables_empty_cell_is_null_in_a_session_too(session: Made) -> None:
    asked = {"t": 0, "in": 192, "out": math.nan, "stop": "", "hash_ids": [1, 2, 3]}
    assert session([asked]).turns[0].output_tokens == 0
    with pytest.raises(TraceError, match=r"requests\[0\].in"):
        session([{**asked, "in": math.nan}])


def test_a_session_of_which_no_time_was_recorded_ends(session: Made) -> None:
    found = session([{"t": 0, "in": 64, "hash_ids": [1]}])
    requests = lay_over_users([found], 2, 2 * MAX_GAP_S, seed=1)
    assert 2 < len(requests) <= 2 * 2 * MAX_GAP_S
    runs = runs_for([found], 2, 60.0, block_size=64, seed=1)
    assert 2 < len(runs) < 1000


def test_a_session_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(weka(work())).encode())
    assert len(read_session(path).turns) == len(work())


def test_numbers_of_all_sessions_are_shared_by_those_of_one_lap(session: Made) -> None:
    known = {"hash_id_scope": "global", "tool_tokens": 64, "system_tokens": 0}
    one = session([request(0.0, 256, hash_ids=[10, 20, 30, 40])], "a", **known)
    other = session([request(0.0, 256, hash_ids=[10, 20, 99, 40])], "b", **known)
    plain = session([request(0.0, 256, hash_ids=[10, 20, 30, 40])], "c")
    numbers = BlockNumbers(64)
    first = numbers.prompt(play(one))
    assert first == numbers.prompt(play(one, "another"))
    second = numbers.prompt(play(other))
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]
    later = numbers.prompt(replace(play(one), lap=2))
    assert [a == b for a, b in zip(first, later, strict=True)] == [True, False, False, False]
    assert not set(numbers.prompt(play(plain))[2:]) & {*first, *second}
    assert len(BlockNumbers(128).prompt(play(one))) == 2


def test_a_global_number_may_follow_several_prefixes(session: Made) -> None:
    asked = [request(0.0, 128, hash_ids=[1, 5]), request(1.0, 128, hash_ids=[2, 5])]
    found = session(asked, hash_id_scope="global")
    numbers = BlockNumbers(64)
    one, other = (numbers.prompt(play(found, index=index)) for index in (0, 1))
    assert not {*one} & {*other}


def test_laps_of_a_fleet_are_told_apart(session: Made) -> None:
    found = session(work(), hash_id_scope="global")
    requests = lay_over_users([found], 1, 20_000, seed=1)
    laps = {each.run: each.lap for each in requests}
    assert [*laps.values()][:3] == [1, 2, 3]


def test_subagents_are_sessions_that_start_from_what_they_share(session: Made) -> None:
    forked = {**request(0.0, 1024), "hash_ids": [*range(8), *range(500, 508)]}
    agent = {"type": "subagent", "t": 100.0, "tool_tokens": 128, "requests": [forked]}
    parent = session([request(0.0, 2048), agent, request(300.0, 2560)])
    requests = lay_over_users([parent], 1, 2 * MAX_GAP_S, 1)
    mine = [r for r in requests if r.run == "a"]
    child = next(r for r in requests if r.run == "a.1")
    assert child.at - mine[0].at == pytest.approx(100.0)
    assert child.next_turn is None
    numbers = BlockNumbers(512)
    whole, fork = numbers.prompt(mine[0]), numbers.prompt(child)
    assert len(fork) == 2
    assert fork[1] not in whole


def test_a_subagent_shares_recorded_numbers_with_its_parent(session: Made) -> None:
    forked = request(0.0, 1536, hash_ids=[*range(16), *range(500, 508)])
    agent = {"type": "subagent", "t": 100.0, "tool_tokens": 0, "requests": [forked]}
    parent = session([request(0.0, 2048), agent], tool_tokens=0, system_tokens=0)
    requests = {r.run: r for r in lay_over_users([parent], 1, 2 * MAX_GAP_S, 1)}
    numbers = BlockNumbers(512)
    whole, fork = (numbers.prompt(requests[run]) for run in ("a", "a.1"))
    assert fork[:2] == whole[:2]
    assert fork[2] not in whole


def test_an_answer_is_part_of_the_next_prompt_or_of_none(session: Made) -> None:
    extends = [request(0.0, 1024, **{"out": 513}), request(9.0, 1600)]
    shorter = [request(0.0, 1024, **{"out": 700}), request(9.0, 1600)]
    edited = [request(0.0, 1024, **{"out": 513}), request(9.0, 1600, 700)]
    over = [request(0.0, 1024, **{"out": 513})]
    shared, blocks = [], []
    for number, requests in enumerate((extends, shorter, edited, over)):
        numbers = BlockNumbers(512)
        each = session(requests, f"s{number}")
        answer = numbers.answer(play(each))
        prompts = [numbers.prompt(play(each, index=index)) for index in range(len(requests))]
        blocks.append(len(answer))
        shared.append(answer == prompts[-1][2:3])
        assert shared[-1] or not any(set(answer) & set(prompt) for prompt in prompts)
    assert blocks == [1, 1, 1, 1]
    assert shared == [True, False, False, False]


def test_the_last_token_of_an_answer_completes_no_block(session: Made) -> None:
    each = session([request(0.0, 1024, **{"out": 512}), request(9.0, 1600)])
    assert BlockNumbers(512).answer(play(each)) == []


def test_a_block_is_a_multiple_of_the_recorded_one(session: Made) -> None:
    each = session(work())
    assert len(BlockNumbers(128).prompt(play(each))) == 16
    with pytest.raises(ReplayError, match="--block 100: allowed: a multiple of 64"):
        BlockNumbers(100).prompt(play(each))


def test_what_callers_say_is_a_choice(session: Made) -> None:
    requests = work(6)
    requests[2]["stop"] = ""
    sessions = [session(requests)]
    fields = ("ended", "waiting_for_tool", "expected_return_s", "layers")
    said = {
        signals: {name for line in lines_of(sessions, signals) for name in fields if name in line}
        for signals in Signals
    }
    assert said == {
        Signals.NONE: set(),
        Signals.ENDS: {"ended"},
        Signals.STOPS: {"waiting_for_tool"},
        Signals.ALL: {"ended", "waiting_for_tool", "expected_return_s"},
    }
    first = [line for line in lines_of(sessions, Signals.ALL) if line["session"] == "a"]
    assert [line.get("waiting_for_tool") for line in first] == [True, True, None, True, True, False]
    assert [line.get("ended", False) for line in first] == [False] * 5 + [True]
    assert ["expected_return_s" in line for line in first] == [True, True, False, True, True, False]
    layered = lines_of(sessions, Signals.NONE, with_layers=True)
    assert layered[0]["layers"] == [("capabilities", 0, 1024), ("rules", 1024, 1624)]


def test_pauses_are_told_within_a_factor(session: Made) -> None:
    told = [
        line["expected_return_s"]
        for line in lines_of([session(work(200))], Signals.ALL)
        if "expected_return_s" in line
    ]
    assert len(set(told)) > 100
    assert 58.0 / MAGNITUDE - 0.01 <= min(told) < 30.0
    assert 120.0 < max(told) <= 58.0 * MAGNITUDE + 0.01


def test_the_command_writes_what_replay_reads(tmp_path: Path) -> None:
    directory = tmp_path / "sessions"
    directory.mkdir()
    for number in range(3):
        write(directory / f"s{number}.json.gz", weka(work(8)))
    out = tmp_path / "fleet.jsonl.gz"
    words = ["--users", "4", "--hours", "1", "--seed", "3", "--signals", "all"]
    done = traffic(directory, out, *words)
    assert done.returncode == 0, done.stderr
    trace = load_trace(out)
    assert trace.block_size == 512
    assert trace.has_sessions
    assert f"{len(trace)} requests" in done.stderr


def test_a_fleet_is_replayed_with_the_default_policy(session: Made, tmp_path: Path) -> None:
    sessions = [session(work(8), f"s{number}") for number in range(3)]
    requests = lay_over_users(sessions, 3, 2400.0, 1)
    out, policies = tmp_path / "fleet.jsonl", ["lru", "default", "default+hints", "belady"]
    write_trace(trace_lines(requests, 512, Signals.ALL, 1), out)
    words = ["--policy", ",".join(policies), "--capacity", "20,60", "--processes", "1", "--json"]
    done = kvgraph("replay", str(out), *words)
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)["policies"]
    assert list(rates) == policies
    assert all(0.0 < row["60"] <= rates["belady"]["60"] for row in rates.values())


def test_a_trace_takes_the_place_of_another_once_it_is_whole(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.jsonl", tmp_path / "link.jsonl"
    kept.write_text("precious")
    link.symlink_to(kept)

    def lines(ends: bool) -> Iterator[dict[str, Any]]:
        yield {"kvgraph_trace": 1}
        if not ends:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(lines(ends=False), link)
    assert kept.read_text() == "precious"
    write_trace(lines(ends=True), link)
    assert kept.read_text() == '{"kvgraph_trace":1}\n'
    assert sorted(tmp_path.iterdir()) == [kept, link]
    write_trace(lines(ends=True), Path("/dev/null"))  # which nothing takes the place of
    assert not Path("/dev/null").is_file()
    end, own = os.pipe()
    write_trace(lines(ends=True), Path(f"/dev/fd/{own}"))
    os.close(own)
    with os.fdopen(end) as pipe:
        assert pipe.readline()


def test_the_command_names_what_it_cannot_use(tmp_path: Path) -> None:
    done = traffic(tmp_path, tmp_path / "x.jsonl")
    assert done.returncode == 2
    assert "no session in it" in done.stderr
