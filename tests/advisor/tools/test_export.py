"""``kvgraph export``: what other tools read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from command_line import kvgraph
from kvgraph.advisor.tools.activity import Origin, ReplayedLog, origin_of
from kvgraph.advisor.tools.export import node_link
from kvgraph.advisor.tools.perfetto import lanes, perfetto
from kvgraph.graph.snapshot import save
from kvgraph.graph.types import SourceLayer
from kvgraph.graph.wire.events import (
    Pressure,
    RequestHeld,
    RequestReleased,
    RequestStarted,
    Segment,
)
from page_sidecar import TOKEN, PageSidecar
from small_world import SIZE, LoggedWorld, pack

NAMES = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def checked(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace that Perfetto and chrome://tracing open without complaint.

    By the trace event format (``trace_file`` names it), and by what Perfetto's importer drops:
    spans of one track that overlap without nesting.
    """
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        _check_one(event)
    _check_tracks(events)
    _check_pairs([event for event in events if event["ph"] in "be"])
    return events


def _check_one(event: dict[str, Any]) -> None:
    assert event["name"]
    assert isinstance(event["name"], str)
    for field in ("pid", "tid", "ts"):
        assert type(event[field]) is int, event
        assert event[field] >= 0, event
    assert isinstance(event["args"], dict)
    match event["ph"]:
        case "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
        case "i":
            assert event["s"] in ("g", "p", "t")
        case "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        case "b" | "e":
            assert int(event["id"], 16) >= 0
            assert event["cat"]
        case "M":
            assert event["name"] in NAMES
        case other:
            raise AssertionError(f"{other!r} is no phase that we write")


def _check_tracks(events: list[dict[str, Any]]) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in named, event
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_until: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "two spans of a track overlap"
            open_until.append(end)


def _check_pairs(events: list[dict[str, Any]]) -> None:
    begun: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        whose = event["cat"], event["id"]
        if event["ph"] == "b":
            assert whose not in begun, "an id is used twice"
            begun[whose] = event
        else:
            first = begun.pop(whose)
            assert (first["name"], first["pid"]) == (event["name"], event["pid"])
            assert first["ts"] <= event["ts"]
    assert not begun, "something begins and never ends"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two sessions with pauses, an eviction that is regretted, and requests at the same time."""
    path = tmp_path / "raw.jsonl"
    world = LoggedWorld(path)
    memory = (Segment(int(SourceLayer.MEMORIES), 0, SIZE, memory_id="m7"),)
    world.serve(1, 2, 3, segments=memory)
    world.now += 30
    world.serve(1, 2, 3, 4, found=3)
    world.evict(4, 3)
    world.serve(1, 2, 5, found=2, session="t", engine="b")
    world.serve(1, 2, 3, 4, found=2)
    for _ in range(2):  # both run at once, and never end
        world.start(1, 2, found=2)
    world.tell(Pressure(100, 50, 50, 2, 0))
    save(world.graph, tmp_path / "graph.snap")
    world.close()
    return path


def spans(events: list[dict[str, Any]], begins: str) -> list[dict[str, Any]]:
    return [each for each in events if each["ph"] == "X" and each["name"].startswith(begins)]


def test_a_trace_has_a_track_per_session_and_says_why_blocks_left(recorded: Path) -> None:
    events = checked(perfetto(ReplayedLog(recorded, 100).activity(), 100))
    tracks = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert tracks == ["s", "s (2)", "t", "evictions", "evictions"]
    turns = spans(events, "turn")
    assert [each["name"] for each in turns] == [
        "turn 1: 0 of 3 blocks found",
        "turn 2: 3 of 4 blocks found",
        "turn 3: 2 of 4 blocks found",
        "turn 4: 2 of 2 blocks found",
        "turn 5: 2 of 2 blocks found",
        "turn 1: 2 of 3 blocks found",
    ]
    assert turns[2]["args"]["reason"] == "evicted"
    assert turns[2]["args"]["why it missed"].startswith("Block 3 of 4 left the pool")
    assert turns[0]["dur"] == 2_000_000
    assert spans(events, "pause")[0]["dur"] == 31_000_000
    left = [each for each in events if each["name"].startswith("evicted")]
    assert [each["args"]["blocks"] for each in left] == [2]
    assert left[0]["args"]["wanted again"] == 2
    assert len([each for each in events if each["name"] == "wanted again"]) == 2
    pools = [e["args"]["blocks"] for e in events if e["name"] == "blocks in the pool"]
    assert pools == [3, 4, 2, 4, 1]
    stays = [each for each in events if each["ph"] == "b"]
    assert {each["args"]["left"] for each in stays} == {"evicted", "it is still there"}


def test_a_pause_ends_where_the_next_turn_arrives_however_long_that_waits(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    world = LoggedWorld(path)
    world.serve(1)
    world.now += 30
    world.tell(RequestStarted("late", pack(1), 20, 0, SIZE, "s", waited_s=20.0))
    world.close()
    events = checked(perfetto(ReplayedLog(path, 100).activity(), 100))
    (pause,) = spans(events, "pause")
    assert (pause["dur"], pause["args"]["was s"]) == (11_000_000, 11.0)
    (queue,) = spans(events, "in the queue")
    assert (queue["ts"], queue["dur"]) == (pause["ts"] + pause["dur"], 20_000_000)
    assert queue["tid"] == pause["tid"]


def test_a_hold_is_told_apart_from_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    world = LoggedWorld(path)
    world.serve(7, session="t")
    world.now += 30
    world.tell(RequestHeld("r", 3, "s"), RequestReleased("r", 12.0, "room"))
    world.tell(RequestStarted("r", pack(1), 20, 0, SIZE, "s", waited_s=15.0))
    world.close()
    events = checked(perfetto(ReplayedLog(path, 100).activity(), 100))
    (held,), (queue,) = spans(events, "held for room"), spans(events, "in the queue")
    assert (held["dur"], queue["dur"]) == (12_000_000, 3_000_000)
    assert queue["ts"] == held["ts"] + held["dur"]
    assert "was held for 12 s" in held["args"]["why"]


def test_the_last_stays_are_told(recorded: Path) -> None:
    activity = ReplayedLog(recorded, 100).activity()
    for most in (0, 2):
        events = checked(perfetto(activity, most))
        assert len([each for each in events if each["ph"] == "b"]) == most


def test_what_runs_at_once_has_lanes_of_its_own() -> None:
    assert lanes([(0, 5), (1, 2), (3, 9), (5, 6), (8, 9)]) == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("name", ["raw.jsonl", "graph.snap"])
def test_the_graph_is_networkxs(recorded: Path, name: str) -> None:
    view = origin_of(str(recorded.parent / name)).graph()
    data = json.loads(json.dumps(node_link(view)))
    graph = nx.node_link_graph(data, edges="edges")
    blocks = [node for node, kind in graph.nodes(data="kind") if kind == "block"]
    assert len(blocks) == view.blocks == 5
    first, second = f"{1:#018x}", f"{2:#018x}"
    assert graph.edges[first, second, "prefix_share"]["weight"] >= 2
    assert graph.nodes[first]["layer"] == "memories"
    assert "memory:m7" in graph
    if name == "raw.jsonl":
        assert graph.nodes[first]["tiers"] == ["pool"]
        assert graph.nodes[first]["engines"] == ["a"]


def test_blocks_that_are_called_alike_are_two_nodes(recorded: Path) -> None:
    view = Origin(origin_of(str(recorded)).kind, str(recorded)).graph()
    twins = view.nodes.model_copy(update={"key": ["0x1"] * len(view.nodes.key)})
    data = node_link(view.model_copy(update={"nodes": twins}))
    names = [node["id"] for node in data["nodes"]]
    assert len(set(names)) == len(names)
    assert names[:2] == ["0x1", "0x1@2"]


ENVIRONMENT = {**os.environ, "KVGRAPH_SIDECAR__TOKEN": TOKEN}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return kvgraph("export", *arguments, environment=ENVIRONMENT)


def test_a_running_sidecar_is_exported(busy_sidecar: PageSidecar, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("perfetto", busy_sidecar.url, "-o", f"{out}.trace", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == 48
    events = checked(json.loads(Path(f"{out}.trace").read_text()))
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == ["sessions", "engine engine-one"]
    assert len(spans(events, "turn")) == 48
    assert any(each["name"].startswith("evicted: ") for each in events)
    assert any("unused until it left" in each["name"] for each in events)
    assert "when it entered the pool is in raw logs alone" in done.stderr
    done = run("json", busy_sidecar.url, "-o", f"{out}.json")
    assert "nodes" in done.stdout
    nodes = json.loads(Path(f"{out}.json").read_text())["nodes"]
    assert {"agent-00", "agent-11"} < {each.get("session") for each in nodes}
    assert run("graphml", busy_sidecar.url, "-o", f"{out}.graphml").returncode == 0
    read = nx.read_graphml(f"{out}.graphml", force_multigraph=True)
    assert read.number_of_nodes() == len(nodes)
    assert ET.parse(f"{out}.graphml").getroot().tag.endswith("graphml")


def test_columns_are_read_by_notebooks(busy_sidecar: PageSidecar, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out"
    done = run("parquet", busy_sidecar.url, "-o", str(out), "--json")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    for name in ("requests", "evictions", "blocks", "edges"):
        table = parquet.read_table(out / f"{name}.parquet")
        assert table.num_rows == counts[name] > 0
    requests = parquet.read_table(out / "requests.parquet").to_pylist()
    assert {each["miss_reason"] for each in requests} >= {"never_seen"}
    assert sum(each["blocks_asked"] for each in requests) > 0


def test_columns_are_the_same_whatever_the_first_request_says(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    world = LoggedWorld(tmp_path / "raw.jsonl")
    world.serve(1, 2)
    world.now += 1
    world.tell(RequestStarted("b", pack(3, 4), 2 * SIZE, 0, SIZE, "t", waited_s=9.0))
    world.close()
    done = run("parquet", str(tmp_path / "raw.jsonl"), "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    first, later = parquet.read_table(tmp_path / "out" / "requests.parquet").to_pylist()
    assert (first["waited_s"], first["wait_sentence"]) == (0, None)
    assert later["waited_s"] == 9.0
    assert later["wait_sentence"]
    assert "wait" not in first


def test_nothing_is_written_over_and_failures_are_one_line(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "there"
    out.write_text("mine")
    snapshot = str(recorded.parent / "graph.snap")
    for arguments, said in (
        (("json", str(recorded), "-o", str(out)), "exists"),
        (("perfetto", snapshot, "-o", str(out) + "2"), "and not what happened"),
        (("json", str(tmp_path / "no"), "-o", str(out) + "2"), "cannot be read"),
        (("json", snapshot, "-o", str(tmp_path / "no" / "x")), "cannot be written"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    assert out.read_text() == "mine"


def test_a_missing_library_is_named(recorded: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['networkx'] = sys.modules['pyarrow'] = None\n"
        "from kvgraph.advisor.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    for kind in ("graphml", "parquet"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, "export", kind, str(recorded), "-o",
             str(tmp_path / "x")],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1
        assert "pip install 'kvgraph[export]'" in done.stderr
    assert not (tmp_path / "x").exists()
