"""Snapshots: whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.graph import snapshot
from kvgraph.graph.errors import SnapshotError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.wire.events import BlocksEmbedded, Segment
from turns import removed, started, stored
from wire_keys import pack


@pytest.fixture
def graph() -> KVCacheGraph:
    graph = KVCacheGraph(clock=lambda: 5000.0)
    segments = (Segment(2, 0, 16, None, "policy"), Segment(5, 16, 48, 0.6, None, "memory-7"))
    for request, session in (("r1", "s"), ("r2", "t")):
        said = {"session": session, "tenant": "acme", "segments": segments}
        whole = stored(1, 2, 3, session=session)
        graph.apply("e", [started(request, 1, 2, 3, found=1, **said), whole])
    graph.apply("e", [stored(8, 9), removed(8)])
    return graph


def restored(graph: KVCacheGraph, path: Path, now: float, **options: Any) -> KVCacheGraph:
    """What is read at this time of what a graph wrote."""
    snapshot.save(graph, path / "graph.snap")
    back = KVCacheGraph(clock=lambda: now, **options)
    snapshot.load(back, path / "graph.snap")
    back.check_integrity()
    return back


def test_a_snapshot_restores_all_but_residency(graph: KVCacheGraph, tmp_path: Path) -> None:
    back = restored(graph, tmp_path, now=17.0)
    for key in (1, 2, 3, 8, 9):
        before, after = graph.explain(key), back.explain(key)
        for gone in ("tiers", "ranks"):
            assert after.pop(gone) == {}
            before.pop(gone)
        before.pop("copies"), after.pop("copies")  # they tell of residency, too
        assert after["age_s"] == before["age_s"], "ages survive a clock that started anew"
        credit = "session_credit"  # a restored session is idle: whoever ran it is gone
        assert before["terms"].pop(credit) <= after["terms"].pop(credit)
        before.pop("score"), after.pop("score")
        assert after == before
    back.apply("e", [stored(1, 2, 3)])
    assert sorted(back.suggest_eviction(9)) == [1, 2, 3]


def test_a_snapshot_of_more_names_than_are_allowed_now(graph: KVCacheGraph, tmp_path: Path) -> None:
    for number in range(4):
        segments = (Segment(5, 0, 16, None, f"file-{number}", f"memory-{number}"),)
        said = {"session": "s", "tenant": f"tenant-{number}", "segments": segments}
        graph.apply("e", [started(f"n{number}", 100 + number, **said)])
    back = restored(graph, tmp_path, now=5001.0, limits=GraphLimits(max_names=1))
    for key in (1, 100, 103):
        before, after = graph.explain(key), back.explain(key)
        assert (after["tenant"], after["identity"]) == (before["tenant"], before["identity"])
        assert back.neighbors(key)
    assert back.explain_session("s", "tenant-3")["tenant"] == "tenant-3"


def test_a_row_of_a_name_that_is_not_there_is_noticed(graph: KVCacheGraph, tmp_path: Path) -> None:
    graph.tables.blocks.identity[0] = 99
    with pytest.raises(AssertionError, match="identity is of no name"):
        graph.check_integrity()
    snapshot.save(graph, tmp_path / "graph.snap")
    with pytest.raises(SnapshotError, match="identity is of no name"):
        snapshot.load(KVCacheGraph(), tmp_path / "graph.snap")


def signed(payload: bytes) -> bytes:
    """A snapshot of this version whose digest is right, whatever is in it."""
    magic = b"KVGSNAP\x0c"
    return magic + hashlib.blake2b(payload, digest_size=32).digest() + payload


def packed(arrays: dict[str, Any], save: Callable[..., None] = np.savez) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def of_strange_names(arrays: dict[str, Any], names: bytes) -> bytes:
    return packed({**arrays, "names": np.frombuffer(names, dtype=np.uint8)})


def with_a_bit(payload: bytes, field: int, value: int) -> bytes:
    """A zip archive with another value at a place of its first central header."""
    changed = bytearray(payload)
    changed[changed.find(b"PK\1\2") + field] = value
    return bytes(changed)


Change = Callable[[dict[str, Any], bytes], bytes]


def changed(column: str, change: Callable[[Any], Any]) -> Change:
    return lambda arrays, payload: packed({**arrays, column: change(arrays[column])})


STRANGE: dict[str, Change] = {
    "no archive": lambda arrays, payload: b"text",
    "names that nest": lambda arrays, payload: of_strange_names(arrays, b"[" * 100_000),
    "names that are none": lambda arrays, payload: of_strange_names(arrays, b"null"),
    "names of no text": lambda arrays, payload: of_strange_names(arrays, b"\xff\xfe"),
    "a number of 5,000 digits": lambda arrays, payload: of_strange_names(arrays, b"1" * 5000),
    "an encrypted part": lambda arrays, payload: with_a_bit(payload, 8, 1),
    "an unknown compression": lambda arrays, payload: with_a_bit(payload, 10, 99),
    "complex depths": changed("blocks.depth", lambda column: column.astype("c16")),
    "dates": changed("blocks.created", lambda column: column.astype("M8[s]")),
    "one column less": lambda arrays, payload: packed(
        {name: each for name, each in arrays.items() if name != "blocks.parent"}
    ),
    "a layer that is none": changed("blocks.layer", lambda column: column + 200),
    "a state that is none": changed("sessions.state", lambda column: column + 77),
    "a tool that is none": changed("sessions.tool", lambda column: column + 99),
    "fewer than no turns": changed("sessions.turns", lambda column: column - 99),
    "a layer of no session's": changed("blocks.raised_by", lambda column: column + 999),
    "parents before the first": changed("blocks.parent", lambda column: column - 5),
    "strange embeddings": lambda arrays, payload: packed(
        {**arrays, "embeddings.rows": np.array(["x"]), "embeddings.vectors": np.array(7)}
    ),
    "a bomb": lambda arrays, payload: packed(
        {**arrays, "edges.more": np.zeros(1 << 26, np.uint8)}, np.savez_compressed
    ),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_right_digest_is_not_enough(graph: KVCacheGraph, tmp_path: Path, what: str) -> None:
    path = tmp_path / "graph.snap"
    snapshot.save(graph, path)
    payload = path.read_bytes()[40:]
    with np.load(io.BytesIO(payload)) as archive:
        arrays = dict(archive)
    path.write_bytes(signed(STRANGE[what](arrays, payload)))
    empty = KVCacheGraph()
    tables = empty.tables
    with pytest.raises(SnapshotError, match=r"graph\.snap"):
        snapshot.load(empty, path)
    assert empty.tables is tables, "nothing of it was taken"


def test_a_part_is_never_larger_than_the_file_says(graph: KVCacheGraph, tmp_path: Path) -> None:
    """A snapshot takes as much memory as its file has bytes, some times over."""
    path = tmp_path / "graph.snap"
    path.write_bytes(signed(packed({"a": np.zeros(1 << 28, np.uint8)}, np.savez_compressed)))
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotError, match="compressed"):
            snapshot.load(KVCacheGraph(), path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "graph.snap")
    with pytest.raises(SnapshotError, match="not a regular file"):
        snapshot.load(KVCacheGraph(), tmp_path / "graph.snap")


def test_a_failed_write_leaves_the_last_snapshot(graph: KVCacheGraph, tmp_path: Path) -> None:
    path = tmp_path / "graph.snap"
    snapshot.save(graph, path)
    good = path.read_bytes()
    full = Path("/dev/full")
    with pytest.raises(SnapshotError, match="cannot write"):
        snapshot.save(graph, full / "graph.snap")
    assert path.read_bytes() == good
    assert [each.name for each in tmp_path.iterdir()] == ["graph.snap"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"nowhere\.snap"):
        snapshot.load(KVCacheGraph(), tmp_path / "nowhere.snap")


def test_what_sessions_taught_is_kept(tmp_path: Path) -> None:
    """Return probabilities and the mean tool pause come back as they were learned."""
    graph = KVCacheGraph(clock=lambda: 100.0)
    sessions = graph.tables.sessions
    for number in range(60):
        row = sessions.ensure(f"s{number}", -1, 0.0)
        sessions.begin_turn(row, 0, 0.0, 10)
        sessions.end_turn(row, -1, 0.0, 10, 20)
        sessions.wait(row, 0.0)
        if number < 6:
            sessions.begin_turn(row, 0, 7.0, 30)
        elif number < 40:
            sessions.end(row)
    taught = restored(graph, tmp_path, now=5.0).tables.sessions
    np.testing.assert_array_equal(taught.return_probability(), sessions.return_probability())
    assert taught.learned()["pause"] == sessions.learned()["pause"] == 7.0


def test_embeddings_are_found_again(tmp_path: Path) -> None:
    """After a restart a new block is linked to those of before."""
    graph = KVCacheGraph()
    old, new = np.array([[1, 0, 0, 0], [0.98, 0.1, 0, 0]], dtype="<f2")
    graph.apply("e", [stored(1), BlocksEmbedded(pack(1), 4, old.tobytes())])
    back = restored(graph, tmp_path, now=5.0)
    back.apply("e", [stored(2), BlocksEmbedded(pack(2), 4, new.tobytes())])
    back.apply("e", [BlocksEmbedded(pack(1), 4, old.tobytes())])  # told once more
    links = [link for link in back.neighbors(2) if link["type"] == "semantic"]
    assert [link["node"] for link in links] == ["0x0000000000000001"]
    back.check_integrity()
