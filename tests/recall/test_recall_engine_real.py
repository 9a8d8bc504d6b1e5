"""A real vLLM engine with recall: moved text is spliced, and nobody else notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
SCRIPT = "engine_recall.py"
BLOCK_BYTES = 65_536  # of the tiny model in float32


@pytest.fixture(scope="module")
def calibrations(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``kvgraph calibrate`` says of the model, whatever it says is allowed."""
    import os
    import subprocess
    import sys

    directory = tmp_path_factory.mktemp("calibrations")
    subprocess.run(
        [
            sys.executable, "-P", "-c", "from kvgraph.hooks.calibrate import app; app()",
            str(tiny_model), "--quick", "--samples", "1", "--most-kl", "100",
            "--least-agreement", "0", "--json",
        ],
        env={**os.environ, "AITHER_KVCACHE_CALIBRATIONS": str(directory)}, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def stock(tiny_model: Path, new_engine: Any) -> Any:
    return new_engine(SCRIPT, {"model": str(tiny_model), "recall": False}).run().result


@pytest.fixture(scope="module")
def recall(
    tiny_model: Path, calibrations: Path, new_engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return (
        new_engine(
            SCRIPT,
            {"model": str(tiny_model), "recall": True},
            AITHER_KVCACHE_GRAPH="1",
            AITHER_KVCACHE_SIDECAR=f"ipc://{tmp_path_factory.mktemp('s')}/nobody",
            AITHER_KVCACHE_WARM_GIB=str(400.5 * BLOCK_BYTES / 2**30),
            AITHER_KVCACHE_CALIBRATIONS=str(calibrations),
            AITHER_KVCACHE_RECALL_SHARED="1",
        )
        .run()
        .result
    )


def test_text_that_lost_its_head_comes_back_without_computing_it(recall: Any) -> None:
    told = recall["dropped head"]
    assert told["exact"] == 0
    # 280 tokens and 24 of the answer: whole blocks of what the first request left
    assert told["spliced"] >= 200
    assert told["cached"] == told["spliced"]
    assert recall["two pieces"]["spliced"] > 150
    assert recall["survivors"]["exact"] == 32


def test_spliced_keys_are_those_that_computing_leaves_there(recall: Any) -> None:
    assert recall["keys"]["spliced"] > 90
    assert recall["keys"]["error"] < 1e-5


def test_who_did_not_ask_gets_what_stock_says_and_nothing_of_it(recall: Any, stock: Any) -> None:
    plain = [name for name in stock if name.startswith("plain")]
    assert len(plain) == 4
    for name in plain:
        assert recall[name]["text"] == stock[name]["text"], name
        assert "spliced" not in recall[name]
    # What a plain request finds is exact: the same prompt's approximate blocks are not there.
    assert recall["plain, same prompt"]["cached"] == 0


def test_the_calibration_says_what_it_measured(calibrations: Path) -> None:
    (path,) = calibrations.glob("*.json")
    kept = json.loads(path.read_text())
    assert kept["passed"]
    assert len(kept["cells"]) > 4
    assert all(cell["kl"] >= 0 for cell in kept["cells"])
