"""``kvgraph bench engine``: what is counted, what is fed, and what may be claimed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph_bench.engine import engine
from kvgraph_bench.engine.engine import GRAPH, STOCK, ratios
from kvgraph_bench.engine.engine_rounds import Round, Rounds
from kvgraph_bench.graph.graph import Traffic, add_sessions
from kvgraph_bench.graph.graphs import ENGINE, build_graph, churned_graph, ranking_seconds
from kvgraph_bench.sidecars.sidecar_bench import SESSIONS, SessionFeed
from kvgraph_bench.sidecars.sidecar_process import SidecarProcess, wait_until

# What may be claimed ----------------------------------------------------------------------------


def rounds(**cpu: list[float]) -> Rounds:
    return {arm: [Round(1000, 2.0, each) for each in found] for arm, found in cpu.items()}


def test_an_arm_is_held_to_both_stock_servers_of_its_pair() -> None:
    found = rounds(stock=[1.0, 2.0], stock_again=[3.0, 2.0], graph=[2.2, 2.2])
    cpu = ratios(found, GRAPH, STOCK, lambda each: each.cpu_per_1000)
    assert cpu == pytest.approx([1.1, 1.1])


def test_an_interrupted_run_gives_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(record: engine.Record, *_: object) -> None:
        record.note(STOCK[0], Round(1000, 2.0, 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_make_rounds", interrupted)
    raw = tmp_path / "engine.json"
    figures = engine.run(progress=False, raw=raw, part="engine")
    assert figures.figures["complete"].value is False
    assert json.loads(raw.read_text())["rounds"] == {
        STOCK[0]: [{"tokens": 1000, "wall_s": 2.0, "cpu_s": 1.0}]
    }


# What a sidecar is fed --------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 4])
def test_a_sidecar_knows_what_the_feed_says_is_there(turns: int, socket_directory: Path) -> None:
    with (
        SidecarProcess(socket_directory) as sidecar,
        SessionFeed(sidecar.endpoint, blocks=20, turns=turns) as feed,
    ):
        assert wait_until(lambda: feed.client.standing.linked, 30)
        shared = len(feed.resident()) // 8  # what all sessions begin with is there already
        for number in range(12 * SESSIONS // 5):
            feed.step()
            if number % 40 == 0:
                time.sleep(0.01)
        assert wait_until(lambda: counted(sidecar).get("requests") == 12 * SESSIONS, 30)
        resident = np.frombuffer(feed.resident(), dtype="<u8")
        assert wait_until(lambda: held(sidecar) == len(resident), 30), held(sidecar)
        counters = counted(sidecar)
        assert feed.client.dropped == 0
    assert len(set(resident.tolist())) == len(resident) == feed.num_blocks - 1, "the pool is full"
    assert counters["blocks_removed"] == counters["blocks_stored"] - len(resident) + shared
    found = counters["cached_tokens"] / counters["prompt_tokens"]
    assert found == 0 if turns == 1 else 0.5 < found < 0.9, found


def counted(sidecar: SidecarProcess) -> dict[str, int]:
    counters: dict[str, int] = sidecar.status()["graph"]["counters"]
    return counters


def held(sidecar: SidecarProcess) -> int:
    engines = [each["graph"] for each in sidecar.status()["engines"]]
    return int(engines[0]["resident"]) if engines and engines[0] else 0


def test_under_pressure_whatever_is_stored_evicts_as_much() -> None:
    graph, pool = KVCacheGraph(), 4096
    for batch in Traffic(pool).batches(5 * 8192):
        graph.apply(ENGINE, batch)
        assert graph.resident_count(ENGINE) == pool
    assert graph.counters["blocks_stored"] == 5 * 8192
    assert graph.counters["blocks_removed"] == 5 * 8192 - pool
    assert graph.counters["requests"] == 5 * 32
    graph.check_integrity()


def test_a_graph_of_so_many_blocks_edges_and_sessions() -> None:
    graph = build_graph(2_000, 6_000)
    add_sessions(graph, 500)
    stats = graph.stats()
    assert stats.blocks == stats.engines[ENGINE].resident == 2_000
    assert sum(stats.edges.values()) == 6_000
    assert sum(stats.sessions.values()) == 500 + 32
    graph.check_integrity()


def test_a_churned_table_has_ghosts_and_a_ranking_holds_the_lock_for_a_part_of_it_only() -> None:
    graph, churn = churned_graph(2_000)
    assert graph.resident_count(ENGINE) == pytest.approx(2_000, abs=100)
    assert len(graph.tables.blocks) > 3_900
    took, longest_s = ranking_seconds(graph, churn, 3)
    assert len(took) == 3
    assert 0 < longest_s < max(took)
    assert graph.policy.name == "lifecycle"
    graph.check_integrity()
