"""What happened, as a recording and a live sidecar tell it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.page.misses import RequestQuery, requests_of
from kvgraph.advisor.replay.recorder import Recorder
from kvgraph.advisor.replay.trace import TraceError
from kvgraph.advisor.tools.activity import NOT_RECORDED, Kind, ReplayedLog, origin_of
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
from small_world import BEGIN, SIZE, LoggedWorld, pack, page_of


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
        assert played.miss is not None
        assert live.miss is not None
        assert (played.miss.reason, played.miss.index) == (live.miss.reason, live.miss.index)
    missed = activity.requests[2].miss
    assert missed is not None
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
