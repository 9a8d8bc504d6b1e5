"""A real vLLM whose decode steps are sampled, beside a sidecar: six types of edges come to be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.service import Service
from kvgraph.graph.types import EDGE_NAMES

pytestmark = pytest.mark.engine
PATIENCE_S = 240.0


@pytest.fixture
def service(socket_directory: Path) -> Iterator[Service]:
    service = Service(Config(sidecar={"endpoint": f"ipc://{socket_directory}/s"}))
    thread = threading.Thread(target=service.run)
    thread.start()
    yield service
    service.stop()
    thread.join(10)


def test_all_types_of_edges_come_to_be(
    service: Service, new_engine: Any, tiny_model: Path, tmp_path: Path
) -> None:
    seen: dict[str, int] = {}
    engine = new_engine(
        "engine_sampled.py",
        {"model": str(tiny_model), "seconds": PATIENCE_S, "until": str(tmp_path / "enough")},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=service.endpoint,
        AITHER_KVCACHE_HINTS="all", AITHER_KVCACHE_SAMPLING="0.2", AITHER_KVCACHE_SPILL="all",
        AITHER_KVCACHE_WARM_GIB="0.05", VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while engine.running and time.monotonic() < deadline and len(seen) < len(EDGE_NAMES):
        time.sleep(0.5)
        edges = service.graph.stats().edges
        seen |= {name: count for name, count in edges.items() if count}
    (tmp_path / "enough").touch()
    run = engine.run()
    assert set(seen) == set(EDGE_NAMES), run.log
    sessions, blocks = service.graph.tables.sessions, service.graph.tables.blocks
    sure = sessions.confidence[: sessions.size]
    assert ((sure >= 0) & (sure <= 1)).any(), "the model's confidence was told of some session"
    assert blocks.attention[: blocks.size].max() > 0


def test_steps_sampled_as_on_a_gpu_answer_as_others_do(new_engine: Any, tiny_model: Path) -> None:
    """All but the GPU: a real runner and scheduler, and kvgraph's connector between them."""
    run = new_engine(
        "engine_sampled.py",
        {"model": str(tiny_model), "seconds": PATIENCE_S / 4, "as_on_a_gpu": True},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR="ipc:///tmp/kvgraph-nobody",
    ).run()  # fmt: skip
    found = run.result
    assert found["same"]
    assert found["samples"] >= 60, run.log
    assert found["masses"]
    assert all(0.5 < mass <= 1.001 for mass in found["masses"])
    assert found["dispatched"] >= found["steps"] > 5, "once per sampled step"
    assert found["late"] * 4 == found["samples"], "told by the next step, before its tokens"
    assert found["left"] == ["execute_model"], "nothing failed"
    assert not found["shadowed"]
    assert not run.lines("sampled no more")
