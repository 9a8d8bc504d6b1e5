"""``kvgraph export``: what other tools read."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx as nx
import pytest
from command_line import kvgraph
from kvgraph.advisor.page.graph import graph_view
from kvgraph.advisor.tools.export import MOST_NODES, node_link, write_graphml
from kvgraph.graph.snapshot import save
from kvgraph.graph.types import SourceLayer
from kvgraph.graph.wire.events import Segment
from page_sidecar import TOKEN, PageSidecar
from small_world import SIZE, World

ENVIRONMENT = {**os.environ, "KVGRAPH_SIDECAR__TOKEN": TOKEN}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return kvgraph("export", *arguments, environment=ENVIRONMENT)


@pytest.fixture
def world() -> World:
    """Two sessions that share a prompt's head, one of them with a memory."""
    world = World()
    memory = (Segment(int(SourceLayer.MEMORIES), 0, SIZE, memory_id="m7"),)
    world.serve(1, 2, 3, segments=memory)
    world.serve(1, 2, 3, 4, found=3)
    world.evict(4, 3)
    world.serve(1, 2, 5, found=2, session="t", engine="b")
    return world


@pytest.fixture
def snapshot(world: World, tmp_path: Path) -> Path:
    path = tmp_path / "graph.snap"
    save(world.graph, path)
    return path


def test_a_snapshot_is_exported(snapshot: Path, tmp_path: Path) -> None:
    done = run("json", str(snapshot), "-o", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    graph = nx.node_link_graph(json.loads((tmp_path / "out.json").read_text()), edges="edges")
    blocks = [node for node, kind in graph.nodes(data="kind") if kind == "block"]
    assert len(blocks) == 5
    assert "memory:m7" in graph


def test_the_graph_is_networkxs(world: World) -> None:
    view = graph_view(world.graph, MOST_NODES, None, float)
    data = json.loads(json.dumps(node_link(view)))
    graph = nx.node_link_graph(data, edges="edges")
    first, second = f"{1:#018x}", f"{2:#018x}"
    assert graph.edges[first, second, "prefix_share"]["weight"] >= 2
    assert graph.nodes[first]["layer"] == "memories"
    assert graph.nodes[first]["tiers"] == ["pool"]
    assert graph.nodes[first]["engines"] == ["a"]


def test_blocks_that_are_called_alike_are_two_nodes(world: World) -> None:
    view = graph_view(world.graph, MOST_NODES, None, float)
    twins = view.nodes.model_copy(update={"key": ["0x1"] * len(view.nodes.key)})
    data = node_link(view.model_copy(update={"nodes": twins}))
    names = [node["id"] for node in data["nodes"]]
    assert len(set(names)) == len(names)
    assert names[:2] == ["0x1", "0x1@2"]


def test_a_running_sidecar_is_exported(busy_sidecar: PageSidecar, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("json", busy_sidecar.url, "-o", f"{out}.json")
    assert "nodes" in done.stdout
    nodes = json.loads(Path(f"{out}.json").read_text())["nodes"]
    assert {"agent-00", "agent-11"} < {each.get("session") for each in nodes}
    assert run("graphml", busy_sidecar.url, "-o", f"{out}.graphml").returncode == 0
    read = nx.read_graphml(f"{out}.graphml", force_multigraph=True)
    assert read.number_of_nodes() == len(nodes)
    assert ET.parse(f"{out}.graphml").getroot().tag.endswith("graphml")


def test_graphml_of_any_names_can_be_read_again(tmp_path: Path) -> None:
    hostile = "".join(map(chr, range(32))) + '\x7f\ufffe\uffff<b>&"\U0001f600'
    memory = f"memory:{hostile}"
    block = {"id": "0x01", "kind": "block", "session": hostile, "engines": [hostile]}
    edge = {"source": "0x01", "target": memory, "key": "memory_ref", "weight": 1.0}
    nodes = [block, {"id": memory, "kind": "memory"}]
    data = {"directed": True, "multigraph": True, "graph": {}, "nodes": nodes, "edges": [edge]}
    write_graphml(data, tmp_path / "graph.xml")
    read = nx.read_graphml(tmp_path / "graph.xml", force_multigraph=True)
    assert read.number_of_edges() == 1
    assert len(read) == 2
    assert "\\x00\\x01" in read.nodes["0x01"]["session"]
    assert read.nodes["0x01"]["session"].endswith('\\uffff<b>&"\U0001f600')


def test_nothing_is_written_over_and_failures_are_one_line(snapshot: Path, tmp_path: Path) -> None:
    out = tmp_path / "there"
    out.write_text("mine")
    for arguments, said in (
        (("json", str(snapshot), "-o", str(out)), "exists"),
        (("json", str(out), "-o", str(out) + "2"), "there"),
        (("json", str(tmp_path / "no"), "-o", str(out) + "2"), "no"),
        (("json", str(snapshot), "-o", str(tmp_path / "no" / "x")), "cannot be written"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr
    assert out.read_text() == "mine"


@pytest.mark.parametrize("format", ["json", "graphml"])
def test_a_full_disk_leaves_no_file_in_the_way(snapshot: Path, tmp_path: Path, format: str) -> None:
    out, before = tmp_path / "graph", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file may grow any more
    try:
        done = run(format, str(snapshot), "-o", str(out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert run(format, str(snapshot), "-o", str(out)).returncode == 0


def test_a_missing_library_is_named(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    done = run("graphml", str(snapshot), "-o", str(tmp_path / "x"))
    assert done.returncode == 1
    assert "pip install 'kvgraph[export]'" in done.stderr
    assert not (tmp_path / "x").exists()
