"""Mooncake's store behind the same object, in a network of its own; where Mooncake is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvgraph.hooks.store.stores import MooncakeStore
from kvgraph.kernels.errors import StorageError
from kvgraph_bench.fleet.kills.mooncake_processes import why_not
from kvgraph_bench.fleet.processes.apart import APART

PROGRAM = Path(__file__).parent / "programs" / "mooncake_pair.py"


@pytest.fixture(scope="module")
def pair() -> Any:
    """What two clients of one master found, until the owner of a value and the master died."""
    if reason := why_not():
        pytest.skip(reason)
    command = [*APART, sys.executable, "-P", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_one_client_reads_what_another_wrote(pair: Any) -> None:
    assert pair["read"]
    assert pair["missing"] is False
    assert pair["holds"] == [True, False]


def test_a_value_that_is_there_is_not_sent_again(pair: Any) -> None:
    assert pair["spared"] == 1


def test_a_dead_owner_s_value_is_not_given(pair: Any) -> None:
    assert pair["owner_dead"] is False


def test_a_dead_master_is_asked_once(pair: Any) -> None:
    assert pair["master_dead"] == [False] * 5
    assert pair["refused_s"] < 0.5, "only the first call waits for it"
    assert pair["longest_gap_s"] < 1.0, "and no other thread waits with it"


@pytest.mark.parametrize(
    ("place", "problem"),
    [("mooncake://nowhere", "HOST:PORT"), ("mooncake://127.0.0.1:1", "refused|libibverbs|pip")],
)
def test_without_a_master_an_engine_starts_all_the_same(place: str, problem: str) -> None:
    with pytest.raises(StorageError, match=problem):
        MooncakeStore(place, 0)
