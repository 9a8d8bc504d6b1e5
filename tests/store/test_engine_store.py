"""Real vLLM engines that share a directory: what one computed the next loads, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timing]
SCRIPT = "engine_store.py"
BLOCK_BYTES = 65_536  # of the tiny model in float32
BLOCKS = 12  # of a context
CONTEXTS = {"plain": 1, "slow": 2, "other_bytes": 3, "private": 4, "hanging": 5, "gone": 6}
COMPUTED = BLOCKS * 32 + 3  # of a context that nobody has
LEFT = 3 + 32  # … and of one that is there: what is behind the last whole block


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "store"


@pytest.fixture(scope="module")
def engine(
    tiny_model: Path, new_engine: Any, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Starts an engine; with the store unless told otherwise."""

    def run(*, shared: bool = True, faults: bool = False) -> Any:
        gib = 2**30
        there = {
            "AITHER_KVCACHE_STORE": str(store),
            "AITHER_KVCACHE_STORE_GIB": str(1600 * BLOCK_BYTES / gib),
        }
        options = {"model": str(tiny_model), "contexts": CONTEXTS}
        return new_engine(
            SCRIPT, {**options, "store": str(store), "faults": faults}, AITHER_KVCACHE_GRAPH="1",
            AITHER_KVCACHE_SIDECAR=f"ipc://{tmp_path_factory.mktemp('s')}/nobody",
            AITHER_KVCACHE_WARM_GIB=str(40.5 * BLOCK_BYTES / gib), OMP_NUM_THREADS="1",
            **(there if shared else {}),
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def unshared(engine: Any) -> Any:
    """It runs beside the first that shares: of neither is anything timed."""
    return engine(shared=False)


@pytest.fixture(scope="module")
def alone(unshared: Any) -> Any:
    return unshared.run()


@pytest.fixture(scope="module")
def first(unshared: Any, engine: Any, store: Path) -> Any:
    run = engine().run()
    marks, files = list(store.glob("*/hashing/*.kv")), list(store.glob("*/*/*.kv"))
    run.result["files"], run.result["marks"] = len(files) - len(marks), len(marks)
    return run


@pytest.fixture(scope="module")
def second(engine: Any, first: Any, alone: Any) -> Any:
    return engine(faults=True).run()


def texts(run: Any) -> dict[str, list[int]]:
    return {name: each["text"] for name, each in run.result["served"].items()}


def test_no_store_and_no_fault_changes_a_token(first: Any, alone: Any, second: Any) -> None:
    assert texts(first) == texts(alone)
    assert texts(second) == texts(alone)


def test_without_the_variable_no_stores_library_is_imported(alone: Any) -> None:
    assert alone.result["imported"] == []


def test_what_requests_leave_goes_to_the_store_once(first: Any) -> None:
    served = first.result["served"]
    assert served["plain"]["computed"] == COMPUTED
    assert served["plain"]["counts"]["shared"] == BLOCKS
    assert first.result["files"] == BLOCKS * (len(CONTEXTS) - 1)
    assert first.result["marks"] == 1


def test_another_engine_loads_it(second: Any) -> None:
    plain = second.result["served"]["plain"]
    assert plain["computed"] <= LEFT
    assert plain["counts"]["store_loaded"] == BLOCKS


def test_engines_that_hash_blocks_alike_say_nothing_of_it(first: Any, second: Any) -> None:
    for run in (first, second):
        assert "on this shared store has" not in run.log


def test_what_a_caller_keeps_private_is_computed(second: Any) -> None:
    assert second.result["served"]["private"]["computed"] == COMPUTED


def test_another_blocks_bytes_are_refused(second: Any) -> None:
    facts = second.result["served"]["other_bytes"]
    assert facts["counts"]["store_failed"] == BLOCKS
    assert "bytes that are not the block" in second.log


@pytest.mark.parametrize("fault", ["gone", "hanging"])
def test_a_store_that_does_not_answer_costs_no_request_a_second(second: Any, fault: str) -> None:
    facts = second.result["served"][fault]
    assert facts["seconds"] < 1.0 + second.result["served"]["private"]["seconds"]


def test_a_slow_store_is_read_as_long_as_computing_takes(second: Any) -> None:
    facts = second.result["served"]["slow"]
    assert 0 < facts["counts"]["store_loaded"] < BLOCKS
