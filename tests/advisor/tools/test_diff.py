"""``kvgraph diff``: what is told of two recordings, or of two stretches of time."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import kvgraph
from kvgraph.advisor.page.misses import RequestQuery, requests_of
from kvgraph.advisor.replay.recorder import Recorder
from kvgraph.advisor.replay.trace import TraceError
from kvgraph.advisor.tools.activity import (
    NOT_RECORDED,
    Activity,
    Kind,
    Minute,
    ReplayedLog,
    origin_of,
)
from kvgraph.advisor.tools.diff import Sums, movers, rows, stretch, sums_of, words
from kvgraph.advisor.tools.remote import RemoteError
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.snapshot import save
from kvgraph.graph.wire.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksResident,
    BlocksStored,
    RequestFinished,
    RequestStarted,
)
from page_sidecar import TOKEN, PageSidecar
from small_world import BEGIN, SIZE, LoggedWorld, pack, page_of

ENVIRONMENT = {**os.environ, "KVGRAPH_SIDECAR__TOKEN": TOKEN, "COLUMNS": "120"}


def recording(path: Path, evicts: bool) -> str:
    """One session's turns, an hour apart; in between its blocks stay, or go and are regretted."""
    world = LoggedWorld(path)
    for turn in range(4):
        found = 0 if turn == 0 else 1 if evicts else 3
        world.serve(1, 2, 3, found=found)
        if evicts:
            world.evict(3, 2)
        world.now += 3600 if turn == 1 else 60
    world.close()
    return str(path)


@pytest.fixture
def both(tmp_path: Path) -> tuple[str, str]:
    return recording(tmp_path / "kept", False), recording(tmp_path / "lost", True)


def sums(name: str) -> Sums:
    return sums_of(stretch(name, lambda origin: origin_of(origin).activity()))


def test_sums_are_what_happened(both: tuple[str, str]) -> None:
    kept, lost = map(sums, both)
    assert (kept.requests, kept.session_count, kept.asked) == (4, 1, 12)
    assert [(each.blocks or {}).get("pool") for each in (kept, lost)] == [9, 3]
    assert [(each.blocks or {}).get("computed") for each in (kept, lost)] == [3, 9]
    assert kept.share == pytest.approx(9 * 16 / (4 * 53))
    assert kept.reasons == {"never_seen": (1, 3), "not_cacheable": (3, 0)}
    assert lost.reasons == {"never_seen": (1, 3), "evicted": (3, 6)}
    assert (kept.evicted, lost.evicted, lost.wanted) == (0, 8, 4)
    assert lost.left_by_layer == {"user_turn": 8}
    assert lost.computed_by == {"s": 9}
    assert kept.regret is None
    assert lost.regret == 0.5


def test_what_moved_most_is_told_first(both: tuple[str, str]) -> None:
    kept, lost = map(sums, both)
    moved = [(each.what, round(12 * each.by)) for each in movers(kept, lost)]
    assert moved == [
        ("evictions of user_turn", 8),
        ("computed because of evicted", 6),
        ("computed by session s", 6),
    ]
    said = words(kept, lost)
    assert said[0].startswith("lost found 22.6% of its prompt tokens, kept 67.9%: 45.3 points less")
    assert "Evictions of user_turn rose from 0.0 to 66.7 blocks per 100 asked for." in said
    assert any("it was here, and left the pool" in each for each in said)
    figures = {row.name: (row.before, row.after) for row in rows(kept, lost)}
    assert figures["missed: evicted, requests"] == (0, 3)
    assert figures["… wanted again in ten minutes"] == (0, 4)


def test_equals_are_told_as_equal(both: tuple[str, str]) -> None:
    kept = sums(both[0])
    assert words(kept, kept) == ["kept found 67.9% of its prompt tokens, kept 67.9%: as much."]
    assert movers(kept, kept) == []


def test_stretches_of_one_recording(both: tuple[str, str]) -> None:
    first, second = (sums(f"{both[1]}@{stretch}") for stretch in ("0m..30m", "30m..2h"))
    assert (first.requests, second.requests) == (2, 2)
    assert (first.evicted, second.evicted) == (4, 4)
    assert (first.wanted, second.wanted) == (2, 2)
    for wrong in ("30m..30m", "2h..1h"):
        with pytest.raises(ConfigError, match="runs backwards"):
            sums(f"{both[1]}@{wrong}")


def test_who_is_silent_is_told(both: tuple[str, str]) -> None:
    kept, silent = sums(both[0]), sums(f"{both[0]}@20h..21h")
    assert words(kept, silent)[0].startswith("No request is known in ")


def test_minutes_tell_where_records_do_not_reach() -> None:
    """Two hours at a rate at which the log of requests holds a quarter of an hour."""
    reasons = {"evicted": 100, "never_seen": 20}
    minutes = [
        Minute(1e9 + 60 * n, 16_000, 8_000 if n < 60 else 12_000, 1_000, 300, 30, reasons,
               {"evicted": 400 if n < 60 else 200, "never_seen": 100})
        for n in range(120)
    ]  # fmt: skip
    end = 1e9 + 7200
    whole = Activity("x", end - 900, end, {}, [], [], [], [], True, [], minutes, end - 900)
    first = sums_of(whole.between(1e9, 1e9 + 3600, "first"))
    second = sums_of(whole.between(1e9 + 3600, end, "second"))
    assert (first.share, second.share) == (0.5, 0.75)
    assert first.reasons == {"evicted": (6_000, 24_000), "never_seen": (1_200, 6_000)}
    assert (first.evicted, first.wanted, first.session_count) == (18_000, 1_800, None)
    said = words(first, second)
    assert "Computed because of evicted fell from 40.0 to 20.0 blocks per 100 asked for" in said[2]
    figures = {row.name: (row.before, row.after) for row in rows(first, second)}
    assert figures["… pool"] == (None, None)
    last = sums_of(whole.between(end - 600, end, "last"))
    assert (last.requests, last.session_count) == (0, 0)


def test_blocks_of_two_sizes_are_not_compared_in_silence(
    both: tuple[str, str], tmp_path: Path
) -> None:
    small, large = sums(both[0]), sums(both[0])
    large = replace(large, name="large", block_sizes=frozenset({512}))
    assert "Blocks have 16 tokens in kept, and 512 in large" in words(small, large)[1]
    assert not any(each.startswith("Blocks have") for each in words(small, small))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return kvgraph("diff", *arguments, environment=ENVIRONMENT)


def test_a_table_and_words_or_json(both: tuple[str, str]) -> None:
    done = run(*both)
    assert done.returncode == 0, done.stderr
    assert "lost found 22.6% of its prompt tokens" in done.stdout
    assert "-45.3 points" in done.stdout
    assert "note: A raw log holds no rankings" in done.stdout
    data = json.loads(run(*both, "--json").stdout)
    assert data["moved"][0]["what"] == "evictions of user_turn"
    assert len(data["unknown"]) == 1
    narrow = kvgraph("diff", *both, environment={**ENVIRONMENT, "COLUMNS": "40"})
    assert max(map(len, narrow.stdout.splitlines())) <= 40


def test_two_stretches_of_a_running_sidecar(busy_sidecar: PageSidecar) -> None:
    done = run("1h..now", f"{busy_sidecar.url}@30m..now", "--url", busy_sidecar.url, "--json")
    assert done.returncode == 0, done.stderr
    figures = {each["name"]: each for each in json.loads(done.stdout)["figures"]}
    assert figures["requests"]["before"] == figures["requests"]["after"] == 48
    assert figures["evictions"]["before"] > 0
    before = run("2h..1h", "1h..now", "--url", busy_sidecar.url)
    assert "No request is known in 2h..1h" in before.stdout
    assert "2h..1h begins before what is known" in before.stdout
    assert "1h..now it is not known yet" in " ".join(before.stdout.split())


def test_failures_are_one_line(both: tuple[str, str]) -> None:
    for arguments, said in (
        (("nowhere", both[0]), "cannot be read"),
        (("1h..2h", "1h..now", "--url", "http://127.0.0.1:1"), "no sidecar answers"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "raw.jsonl"


def test_a_raw_log_tells_what_the_sidecar_told(path: Path) -> None:
    world = LoggedWorld(path)
    world.serve(1, 2, 3)
    world.serve(9, 10, session="other", engine="b")
    world.evict(3, 2)
    world.serve(1, 2, 3, found=1)
    world.start(1, 2, 3, 4, found=3)
    world.close()
    page = page_of(world, since=-BEGIN)
    told = requests_of(page, RequestQuery(10)).requests[::-1]
    activity = ReplayedLog(path, 100).activity()
    assert len(activity.requests) == len(told) == 4
    for live, played in zip(told, activity.requests, strict=True):
        assert played.model_copy(update={"miss": None}) == live.model_copy(update={"miss": None})
        assert (played.miss.reason, played.miss.index) == (live.miss.reason, live.miss.index)
    missed = activity.requests[2].miss
    assert missed.sentence == "Block 2 of 3 left the pool 1.0 s before."
    assert activity.evictions is not None
    assert {each.key for each in activity.evictions} == {f"{2:#018x}", f"{3:#018x}"}
    assert {each.rule for each in activity.evictions} == {NOT_RECORDED}
    assert [each.wanted_after_s is not None for each in activity.evictions] == [True, True]
    assert activity.engines == {"a": "host:a", "b": "host:b"}
    assert activity.end == world.now - BEGIN


def test_blocks_live_from_their_storing_to_their_leaving(path: Path) -> None:
    world = LoggedWorld(path)
    world.serve(1, 2, 3)
    stored = world.now - BEGIN - 1
    world.evict(3)
    world.tell(BlocksResident(pack(1, 7)))
    world.tell(BlocksCleared())
    world.tell(BlocksStored(pack(1), None, SIZE))
    world.close()
    activity = ReplayedLog(path, 100).activity()
    lives = [(int(each.key, 16), each.why) for each in activity.lives]
    assert lives == [
        (3, "evicted"), (2, "news of it was lost"), (1, "reset"), (7, "reset"), (1, None),
    ]  # fmt: skip
    assert (activity.lives[0].begin, activity.lives[0].end) == (stored, stored + 2)
    assert not activity.lives[0].since_use
    assert (activity.lives[0].session, activity.lives[0].layer) == ("s", "user_turn")
    assert [point.blocks for point in activity.pools] == [3, 2, 0, 1]


@pytest.mark.large
def test_a_log_longer_than_the_rings_is_told_whole(path: Path) -> None:
    world = LoggedWorld(path)
    for number in range(2_600):
        world.tell(
            RequestStarted(f"r{number}", pack(number + 1), SIZE + 5, 0, SIZE, "s"),
            RequestFinished(f"r{number}", pack(number + 1), SIZE, SIZE + 5, "stop", "s"),
        )
    for round_ in range(5):
        keys = np.arange(10_000, dtype="<u8") + 10_000 * (round_ + 1)
        world.tell(BlocksStored(keys.tobytes(), None, SIZE))
        world.tell(BlocksRemoved(keys.tobytes()))
    world.close()
    activity = ReplayedLog(path, 100_000).activity()
    assert [each.request for each in activity.requests] == [f"r{n}" for n in range(2_600)]
    assert all(each.finished == "stop" for each in activity.requests)
    assert len({each.key for each in activity.evictions or ()}) == 50_000
    few = ReplayedLog(path, 1_000).activity()
    assert len(few.evictions or ()) == 1_000
    assert "49,000 earlier evictions are not here." in few.unknown


def test_a_trace_tells_requests_alone(tmp_path: Path) -> None:
    now = [0.0]
    recorder = Recorder(tmp_path / "trace.jsonl", clock=lambda: now[0])
    now[0] = 1.0
    recorder("a", [RequestStarted("r", pack(1, 2), 2 * SIZE + 3, SIZE, SIZE, "s")])
    now[0] = 3.0
    recorder("a", [RequestFinished("r", pack(1, 2), 2 * SIZE + 3, 40, "stop", "s")])
    recorder.close()
    origin = origin_of(str(tmp_path / "trace.jsonl"))
    assert origin.kind is Kind.TRACE
    activity = origin.activity()
    (request,) = activity.requests
    assert (request.blocks.asked, request.blocks.pool, request.miss) == (2, 1, None)
    assert (request.at, request.ended_at) == (1.0, 3.0)
    assert activity.evictions is None
    assert not activity.has_reasons
    with pytest.raises(ConfigError, match="no graph"):
        origin.graph()


def test_a_snapshot_has_a_graph_alone(path: Path, tmp_path: Path) -> None:
    world = LoggedWorld(path)
    world.serve(1, 2, 3)
    world.close()
    save(world.graph, tmp_path / "graph.snap")
    origin = origin_of(str(tmp_path / "graph.snap"))
    assert origin.kind is Kind.SNAPSHOT
    assert origin.graph().blocks == 3
    with pytest.raises(ConfigError, match="and not what happened"):
        origin.activity()


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        ("", ConfigError, "is empty"),
        ('{"event": "BlocksRemoved", "at": 1, "engine": "e"}\n', TraceError, "not a line"),
        ('{"event": "BlocksRemoved", "at": 1, "engine": "e", "hashes": ["0xfffffffffffffffff"]}\n',
         TraceError, "not a line"),
        ('{"event": "Pressure", "at": 1, "engine": "e", "total_blocks": -1}\n', TraceError, ":1:"),
        ("neither\n", TraceError, ":1:"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n', TraceError,
         "does not say what requests found"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told(
    path: Path, content: str, error: type[Exception], said: str
) -> None:
    path.write_text(content)
    with pytest.raises(error, match=said):
        origin_of(str(path)).activity()


def test_kinds_of_a_newer_build_are_left_out(path: Path) -> None:
    path.write_text('{"event": "FromTheFuture", "at": 1.5, "engine": "e"}\n')
    assert origin_of(str(path)).activity().end == 1.5


def test_nobody_and_nothing_are_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        origin_of(str(tmp_path / "nowhere"))
    with pytest.raises(RemoteError, match="no sidecar answers"):
        origin_of("http://127.0.0.1:1").activity()


@pytest.mark.parametrize("at", ["Infinity", "NaN", "-1", "1e308"])
def test_a_line_at_no_time_is_named(path: Path, at: str) -> None:
    world = LoggedWorld(path)
    world.serve(1, 2)
    world.close()
    with path.open("a") as file:
        file.write(f'{{"at": {at}, "engine": "a", "event": "BlocksCleared"}}\n')
    lines = len(path.read_text().splitlines())
    with pytest.raises(TraceError, match=f"raw.jsonl:{lines}: not a line of a raw log"):
        ReplayedLog(path, 100)


def test_a_file_that_is_nested_too_deep_is_no_recording(path: Path) -> None:
    path.write_text("[" * 100_000)
    with pytest.raises(TraceError):
        origin_of(str(path)).activity()
