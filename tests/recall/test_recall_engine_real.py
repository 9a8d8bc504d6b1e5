"""A real vLLM engine with recall: moved text is spliced, and nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
SCRIPT = "engine_recall.py"
BLOCK_BYTES = 65_536  # of the tiny model in float32


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("recall"))


@pytest.fixture(scope="module")
def stock(tiny_model: Path, new_engine: Any, scratch: str) -> Any:
    options = {"model": str(tiny_model), "recall": False, "scratch": scratch}
    return new_engine(SCRIPT, options).run().result


@pytest.fixture(scope="module")
def recall(tiny_model: Path, new_engine: Any, scratch: str) -> Any:
    return new_engine(
        SCRIPT, {"model": str(tiny_model), "recall": True, "scratch": scratch},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=f"ipc://{scratch}/nobody",
        AITHER_KVCACHE_WARM_GIB=str(400.5 * BLOCK_BYTES / 2**30),
        AITHER_KVCACHE_RECALL_SHARED="1",
    ).run().result  # fmt: skip


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
        assert recall[name]["tokens"] == stock[name]["tokens"], name
        assert "spliced" not in recall[name]
    # What a plain request finds is exact: the same prompt's approximate blocks are not there.
    assert recall["plain, same prompt"]["cached"] == 0
