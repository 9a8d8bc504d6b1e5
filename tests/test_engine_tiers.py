"""A real vLLM engine with tiers: faults one after the other, the same tokens as stock all along."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
TESTS = Path(__file__).parent
BLOCK_BYTES = 65_536  # of the tiny model in float32
# A load that fails is not among them: vLLM goes on counting what it promised as cached.
FAULTS = ("arena_full", "spill_fails", "disk_corrupt", "disk_full", "restart_other")


def run(model: Path, **env: str) -> tuple[dict[str, Any], str]:
    """Play every scene in one engine; its result and its log."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("AITHER_")}
    fixed = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_PLUGINS": "kvgraph",
    }
    done = subprocess.run(
        [sys.executable, "-P", str(TESTS / "engine_tiers.py"), json.dumps({"model": str(model)})],
        env={**inherited, **fixed, **env}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    match = re.search(r"^RESULT (.*)$", log, re.MULTILINE)
    assert match, log[-4000:]
    return json.loads(match[1]), log


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because one scene makes it look like other weights."""
    return Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("tiers") / "model"))


@pytest.fixture(scope="module")
def stock(model: Path) -> dict[str, Any]:
    return run(model)[0]


@pytest.fixture(scope="module")
def tiers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    gib = 2**30
    return run(
        model,
        AITHER_KVCACHE_GRAPH="1",
        AITHER_KVCACHE_SIDECAR=f"ipc://{tmp_path_factory.mktemp('s')}/nobody",
        AITHER_KVCACHE_WARM_GIB=str(40.5 * BLOCK_BYTES / gib),
        AITHER_KVCACHE_COLD_GIB=str(200.5 * BLOCK_BYTES / gib),
        AITHER_KVCACHE_COLD_DIR=str(tmp_path_factory.mktemp("disk")),
    )


def scene(tiers: tuple[dict[str, Any], str], name: str) -> dict[str, Any]:
    facts: dict[str, Any] = tiers[0]["scenes"][name]
    return facts


def test_no_fault_changes_a_token(stock: dict[str, Any], tiers: tuple[dict[str, Any], str]) -> None:
    texts = tiers[0]["texts"]
    assert texts.keys() == stock["texts"].keys()
    assert [name for name in texts if texts[name] != stock["texts"][name]] == []


def test_after_every_scene_the_pool_is_whole(tiers: tuple[dict[str, Any], str]) -> None:
    scenes = tiers[0]["scenes"]
    assert [name for name, facts in scenes.items() if not facts["whole at the end"]] == []


def test_a_parked_session_comes_back_without_computing_its_context(
    stock: dict[str, Any], tiers: tuple[dict[str, Any], str]
) -> None:
    facts, before = scene(tiers, "returns"), stock["scenes"]["returns"]
    assert before["warm"] > 150
    assert before["cold"] > 150
    assert facts["warm"] <= 3 + 32
    assert facts["cold"] <= 3 + 32
    assert facts["counts"]["sunk"] > 0


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_lost_to_a_fault_is_computed(tiers: tuple[dict[str, Any], str], name: str) -> None:
    assert scene(tiers, name)["computed"] > 32


def test_each_fault_is_counted(tiers: tuple[dict[str, Any], str]) -> None:
    assert scene(tiers, "spill_fails")["counts"]["spill_failed"] > 0
    assert scene(tiers, "load_fails")["counts"]["load_failed"] > 0
    assert scene(tiers, "disk_corrupt")["counts"]["load_failed"] > 0
    assert scene(tiers, "disk_full")["counts"]["sunk"] == 0


def test_each_reason_is_logged_once(tiers: tuple[dict[str, Any], str]) -> None:
    log = tiers[1]
    for reason in ("a spill failed (RuntimeError)", "a load failed (RuntimeError)"):
        assert log.count(reason) == 1, reason


def test_a_slow_disk_holds_up_only_who_needs_it(tiers: tuple[dict[str, Any], str]) -> None:
    facts = scene(tiers, "disk_slow")
    assert facts["waits"] == 1
    assert facts["waited"]


def test_an_aborted_load_gives_its_blocks_back(tiers: tuple[dict[str, Any], str]) -> None:
    facts = scene(tiers, "abort_during_load")
    assert facts["waits"] == 1
    assert facts["kept"], "blocks that a worker writes to are not free"
    assert facts["whole"]


def test_a_preemption_beside_a_load_costs_nothing(tiers: tuple[dict[str, Any], str]) -> None:
    facts = scene(tiers, "preemption")
    assert facts["waits"] == 1
    assert facts["preempted"] >= 1


def test_after_a_reset_nothing_old_is_used(tiers: tuple[dict[str, Any], str]) -> None:
    facts = scene(tiers, "reset")
    assert facts["done"]
    assert facts["computed"] > 150
    assert facts["counts"]["loaded"] == 0


def test_a_restart_finds_its_disk_again(tiers: tuple[dict[str, Any], str]) -> None:
    assert scene(tiers, "restart_same")["computed"] <= 3 + 32


def test_an_error_of_ours_during_a_load_leaves_no_request_waiting(
    tiers: tuple[dict[str, Any], str],
) -> None:
    facts = scene(tiers, "broken_side")
    broken = {name: each for name, each in facts.items() if isinstance(each, dict)}
    broken.pop("counts")
    assert all(each["detached"] and each["whole"] for each in broken.values()), broken
