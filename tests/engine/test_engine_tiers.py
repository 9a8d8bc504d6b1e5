"""A real vLLM engine with tiers: faults one after the other, the same tokens as stock all along."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timing]
SCRIPT = "engine_tiers.py"
CONTEXT_BLOCKS = 7  # of a session that is parked
BLOCK_BYTES = 65_536  # of the tiny model in float32
# A load that fails is not among them: vLLM goes on counting what it promised as cached.
FAULTS = ("arena_full", "spill_fails", "disk_corrupt", "disk_full", "restart_other")


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A copy for each engine, because one scene makes it look like other weights."""
    copies = (tmp_path_factory.mktemp("tiers") / "model" for _ in range(2))
    return [str(shutil.copytree(tiny_model, each)) for each in copies]


@pytest.fixture(scope="module")
def starting(models: list[str], new_engine: Any) -> Any:
    """The engine without tiers, of which nothing is timed; the other starts beside it."""
    return new_engine(SCRIPT, {"model": models[0]})


@pytest.fixture(scope="module")
def stock(starting: Any) -> Any:
    return starting.run()


@pytest.fixture(scope="module")
def tiers(
    starting: Any, models: list[str], new_engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    gib = 2**30
    return new_engine(
        SCRIPT,
        {"model": models[1]},
        AITHER_KVCACHE_GRAPH="1",
        AITHER_KVCACHE_SIDECAR=f"ipc://{tmp_path_factory.mktemp('s')}/nobody",
        AITHER_KVCACHE_WARM_GIB=str(40.5 * BLOCK_BYTES / gib),
        AITHER_KVCACHE_COLD_GIB=str(200.5 * BLOCK_BYTES / gib),
        AITHER_KVCACHE_COLD_DIR=str(tmp_path_factory.mktemp("disk")),
    ).run()


def scene(tiers: Any, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = tiers.result["scenes"][name]
    return facts


def test_no_fault_changes_a_token(tiers: Any, stock: Any) -> None:
    texts = tiers.result["texts"]
    assert texts.keys() == stock.result["texts"].keys()
    assert [name for name in texts if texts[name] != stock.result["texts"][name]] == []


def test_after_every_scene_the_pool_is_whole(tiers: Any) -> None:
    scenes = tiers.result["scenes"]
    assert [name for name, facts in scenes.items() if not facts["whole at the end"]] == []


def test_a_parked_session_comes_back_without_computing_its_context(stock: Any, tiers: Any) -> None:
    facts, before = scene(tiers, "returns"), stock.result["scenes"]["returns"]
    assert before["warm"] > 150
    assert before["cold"] > 150
    assert facts["warm"] <= 3 + 32
    assert facts["cold"] <= 3 + 32
    assert facts["counts"]["demoted"] > 0


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_lost_to_a_fault_is_computed(tiers: Any, name: str) -> None:
    assert scene(tiers, name)["computed"] > 32


def test_each_fault_is_counted(tiers: Any) -> None:
    assert scene(tiers, "spill_fails")["counts"]["spill_failed"] > 0
    assert scene(tiers, "load_fails")["counts"]["load_failed"] > 0
    assert scene(tiers, "disk_corrupt")["counts"]["load_failed"] > 0
    assert scene(tiers, "disk_full")["demoted"] == 0


def test_each_reason_is_logged_once(tiers: Any) -> None:
    log = tiers.log
    for reason in ("a spill failed (RuntimeError)", "a load failed (RuntimeError)"):
        assert log.count(reason) == 1, reason


def test_a_slow_disk_holds_up_only_who_needs_it(tiers: Any) -> None:
    facts = scene(tiers, "disk_slow")
    assert facts["waits"] == 1
    assert facts["waited"]


def test_an_aborted_load_gives_its_blocks_back(tiers: Any) -> None:
    facts = scene(tiers, "abort_during_load")
    assert facts["waits"] == 1
    assert facts["kept"], "blocks that a worker writes to are not free"
    assert facts["whole"]


def test_a_preemption_beside_a_load_costs_nothing(tiers: Any) -> None:
    facts = scene(tiers, "preemption")
    assert facts["waits"] == 1
    assert facts["preempted"] >= 1


def test_after_a_reset_nothing_old_is_used(tiers: Any) -> None:
    facts = scene(tiers, "reset")
    assert facts["done"]
    assert facts["computed"] > 150
    assert facts["loaded"] == 0
    assert facts["restarted"] > 150, "the disk held KV of weights that no file holds"


def test_a_restart_finds_its_disk_again(tiers: Any) -> None:
    assert scene(tiers, "restart_same")["computed"] <= 3 + 32


def test_what_nothing_evicts_is_on_disk_after_an_hour(tiers: Any) -> None:
    facts = scene(tiers, "idle_hour")
    assert facts["pool"] == facts["disk"] == CONTEXT_BLOCKS
    assert facts["computed"] <= 3 + 32


def test_what_memory_has_when_an_engine_ends_a_restart_finds(tiers: Any) -> None:
    facts = scene(tiers, "restart_warm")
    assert facts["disk"] < CONTEXT_BLOCKS
    assert facts["computed"] <= 3 + 32
