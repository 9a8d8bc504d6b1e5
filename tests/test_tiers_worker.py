"""A worker's end of the connector: what it cannot do it refuses, and whose bytes a disk holds."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.hooks.tiers.jobs import JobDone, Load, Spill, TierAnswer, TierWork
from kvgraph.hooks.tiers.settings import TierSettings

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def new_side() -> Any:
    from kvgraph.hooks.vllm.worker import WorkerSide

    return WorkerSide(SimpleNamespace(), TierSettings(1 << 20))


def test_a_cache_that_is_not_known_is_refused_and_so_is_all_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = new_side()
    caplog.set_level(logging.WARNING)
    side.register({"layer": object()})
    side.submit(TierWork((Spill(1, (3,), (1,)), Load(2, (1, 2), (5, 6), {}, "r"))))
    side.submit(TierWork((Load(3, (1,), (7,), {}, None),)))
    assert side.take_finished() == {"r"}
    assert side.take_failed() == {5, 6}
    refused = [JobDone(1, frozenset({0}), 0.0, 0), JobDone(2, frozenset({0, 1}), 0.0, 0)]
    answer = side.take_answer()
    assert answer.done == (*refused, JobDone(3, frozenset({0}), 0.0, 0))
    assert answer.on_disk == ((),), "nobody waits for what its disk holds"
    assert not side.take_answer()
    assert len([r for r in caplog.records if "no tiers on this worker" in r.getMessage()]) == 1
    side.close()


def test_answers_of_workers_add_up() -> None:
    from kvgraph.hooks.vllm.worker import TierWorkerMetadata

    one, two = (TierAnswer((JobDone(n, frozenset(), 0.0, 0),), ((b"x",),)) for n in (1, 2))
    assert TierWorkerMetadata(one).aggregate(TierWorkerMetadata(two)).answer == one + two


def test_weights_are_told_apart_though_their_directory_has_one_name(tmp_path: Path) -> None:
    from kvgraph.hooks.vllm.worker import weights_of

    model = SimpleNamespace(model=str(tmp_path), hf_config=SimpleNamespace(_commit_hash=None))
    (tmp_path / "model.safetensors").write_bytes(b"old")
    os.utime(tmp_path / "model.safetensors", (1, 1))
    before = weights_of(model)
    assert weights_of(model) == before
    (tmp_path / "model.safetensors").write_bytes(b"new")
    assert weights_of(model) != before


def test_a_name_on_a_hub_is_told_by_its_commit() -> None:
    from kvgraph.hooks.vllm.worker import weights_of

    one, two = (
        weights_of(SimpleNamespace(model="a/b", hf_config=SimpleNamespace(_commit_hash=commit)))
        for commit in ("aaa", "bbb")
    )
    assert one != two


@pytest.mark.parametrize(("algorithm", "length"), [("sha256", 32), ("sha256_cbor", 32)])
def test_the_length_of_hashes_is_asked_for(algorithm: str, length: int) -> None:
    from kvgraph.hooks.vllm.worker import hash_bytes

    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    assert hash_bytes(config) == length
