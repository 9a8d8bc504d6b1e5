"""The public face: what others import from ``kvgraph`` itself; unasked, it costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kvgraph
import pytest

PUBLIC = {
    "AdmissionAdvice", "AdvisorClient", "BlocksCleared", "BlocksRemoved", "BlocksStored",
    "CacheWatch",
    "ClassicPolicy", "ClientOptions", "ConfKVCache", "ConfKVSettings", "EdgeType",
    "EngineEnd", "EngineHello", "EvictionRanking",
    "FakeEngine", "GraphLimits", "IntentClient", "KVCacheGraph", "KvEventSource", "KvGraphError",
    "LangGraphCallbacks", "PrefixKeeper",
    "ObserveConfig", "Policy", "RequestFinished", "RequestStarted", "Rules", "ScoreProfile",
    "Segment",
    "Selection",
    "SessionSignal", "SourceLayer", "Tier", "Trace", "View", "Weights",
    "hints", "hit_rate", "load_trace",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(kvgraph.__all__) == PUBLIC
    assert set(dir(kvgraph)) >= PUBLIC
    assert {getattr(kvgraph, name).__name__ for name in PUBLIC} == PUBLIC


def test_type_checkers_are_told_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(kvgraph.__file__).read_text())
    told = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert told == kvgraph._ROOM_OF  # what `__getattr__` goes by


def test_what_needs_an_extra_says_which() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom kvgraph import ConfKVSettings, ConfKVCache"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert "kvgraph.ConfKVCache: " in done.stderr
    assert "pip install 'kvgraph[transformers]'" in done.stderr


def test_what_is_not_public_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="no public name 'Gremlin'"):
        _ = kvgraph.Gremlin


def loaded_by(code: str) -> set[str]:
    """The modules of a process that did nothing else."""
    code += "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_the_face_loads_nothing_before_it_is_asked() -> None:
    ours = {name for name in loaded_by("import kvgraph") if name.startswith("kvgraph.")}
    assert ours == set()


def test_a_graph_needs_neither_torch_nor_sockets() -> None:
    loaded = loaded_by("from kvgraph import KVCacheGraph, ScoreProfile, EvictionRanking")
    assert not loaded & {"torch", "vllm", "zmq", "fastapi", "kvgraph.hooks", "kvgraph.advisor"}
