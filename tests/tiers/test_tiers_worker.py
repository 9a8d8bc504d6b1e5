"""A worker's end of the connector: what it cannot do it refuses, and whose bytes a disk holds."""

from __future__ import annotations

import errno
import logging
import os
import time
from copy import copy as copied
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.hooks.settings import TierSettings
from kvgraph.hooks.tiers.host import available_bytes
from kvgraph.hooks.tiers.jobs import JobDone, Load, Spill, TierAnswer, TierWork, WorkerStart
from kvgraph.kernels.layout_engines import cpu_layout

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def new_side() -> Any:
    from kvgraph.hooks.vllm.tiers.worker import WorkerSide

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
    assert answer.starts == (WorkerStart(),), "nothing is planned with what it does not have"
    assert not side.take_answer()
    assert len([r for r in caplog.records if "no tiers on this worker" in r.getMessage()]) == 1
    side.close()


def test_answers_of_workers_add_up() -> None:
    from kvgraph.hooks.vllm.tiers.worker import TierWorkerMetadata

    one, two = (TierAnswer((JobDone(n, frozenset(), 0.0, 0),), (WorkerStart(n),)) for n in (1, 2))
    assert TierWorkerMetadata(one).aggregate(TierWorkerMetadata(two)).answer == one + two


def model_at(path: object, commit: str | None = None) -> Any:
    return SimpleNamespace(model=str(path), hf_config=SimpleNamespace(_commit_hash=commit))


def test_weights_are_told_apart_though_their_directory_has_one_name(tmp_path: Path) -> None:
    from kvgraph.hooks.vllm.tiers.worker import weights_of

    (tmp_path / "parts").mkdir()
    for at in ("model.safetensors", "parts/more.safetensors"):
        (tmp_path / at).write_bytes(b"old")
        os.utime(tmp_path / at, (1, 1))
    for changed in ("model.safetensors", "parts/more.safetensors"):
        before = weights_of(model_at(tmp_path))
        assert weights_of(model_at(tmp_path)) == before
        os.utime(tmp_path / changed)
        assert weights_of(model_at(tmp_path)) != before


def test_a_link_to_other_weights_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    from kvgraph.hooks.vllm.tiers.worker import weights_of

    link = tmp_path / "model.gguf"
    found = []
    for name in ("old.gguf", "new.gguf"):
        (tmp_path / name).write_bytes(b"same")
        os.utime(tmp_path / name, (1, 1))
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        found.append(weights_of(model_at(link)))
    assert found[0] != found[1]


def test_a_folder_that_contains_itself_is_walked_once(tmp_path: Path) -> None:
    from kvgraph.hooks.vllm.tiers.worker import weights_of

    (tmp_path / "model.safetensors").write_bytes(b"old")
    (tmp_path / "again").symlink_to(tmp_path)
    _, files = weights_of(model_at(tmp_path))
    assert [name for name, *_ in files] == ["model.safetensors"]


def test_a_name_on_a_hub_is_told_by_its_commit() -> None:
    from kvgraph.hooks.vllm.tiers.worker import weights_of

    assert weights_of(model_at("a/b", "aaa")) != weights_of(model_at("a/b", "bbb"))


def test_weights_that_cannot_be_told_from_others_get_no_disk(
    tmp_path: Path, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an object store only configurations are here; a hub's name may have no commit."""
    (tmp_path / "config.json").write_text("{}")
    for model in (model_at(tmp_path), model_at("bucket/name")):
        assert opened(model, tmp_path / "disk") is None
    assert "holds no weights" in caplog.text
    assert "has no commit" in caplog.text
    assert not (tmp_path / "disk").exists()


@pytest.fixture
def opened(paper_config: Any) -> Any:
    """Opens a worker's disk for a model as ``model_at`` describes it."""
    from kvgraph.hooks.vllm.tiers.worker import open_disk

    def disk(model: Any, directory: Path, index: int = 0, rank: int = 0) -> Any:
        config, described = copied(paper_config), copied(paper_config.model_config)
        described.model, described.hf_config = model.model, copied(described.hf_config)
        described.hf_config._commit_hash = model.hf_config._commit_hash
        config.model_config = described
        config.parallel_config = copied(config.parallel_config)
        config.parallel_config.data_parallel_index, config.parallel_config.rank = index, rank
        memory = SimpleNamespace(layout=cpu_layout("vec", 2, 12, 2, 32, 32))
        settings = TierSettings(1 << 20, 4 << 16, directory)
        return open_disk(config, settings, memory, 1 << 16)

    return disk


def test_each_worker_of_each_independent_engine_has_a_disk_of_its_own(
    tmp_path: Path, opened: Any
) -> None:
    model = model_at("a/b", "aaa")
    disks = [opened(model, tmp_path, index, rank) for index in (0, 1) for rank in (0, 1)]
    assert None not in disks
    for disk in disks:
        disk.close()
    assert len(list(tmp_path.glob("*.tier"))) == 4


def test_two_models_that_take_turns_keep_their_disks(tmp_path: Path, opened: Any) -> None:
    for _ in range(2):
        for number, model in enumerate((model_at("a/b", "aaa"), model_at("c/d", "ccc"))):
            disk = opened(model, tmp_path)
            disk.write(number.to_bytes(32, "big"), bytes(1 << 16))
            assert list(disk) == [number.to_bytes(32, "big")]
            disk.close()


def aged(directory: Path, seconds: float) -> None:
    for path in directory.glob("*.tier"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_files_of_other_weights_and_models_age_out_unless_somebody_has_them_open(
    tmp_path: Path,
    opened: Any,
) -> None:
    day = 86_400
    served = opened(model_at("e/f", "served"), tmp_path)
    for model in (model_at("a/b", "old"), model_at("c/d", "ccc")):
        opened(model, tmp_path).close()
    (tmp_path / "notes.tier").write_text("not ours")
    aged(tmp_path, day - 100)
    opened(model_at("a/b", "new"), tmp_path).close()
    assert len(list(tmp_path.glob("*.tier"))) == 5, "who goes back finds what was left"
    aged(tmp_path, day + 100)
    for rank in (0, 1):
        opened(model_at("a/b", "new"), tmp_path, rank=rank).close()
    left = {path.name for path in tmp_path.glob("*.tier")}
    assert len(left) == 4
    assert {served.path.name, "notes.tier"} < left
    served.close()


def test_orphans_give_way_to_a_file_that_needs_their_space(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk with room for two files, the one that was left first goes."""
    names, pwrite = list[str](), os.pwrite

    def full_with_two(*args: Any) -> int:
        if len(list(tmp_path.glob("*.tier"))) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", full_with_two)
    for seconds, commit in ((300, "one"), (200, "two"), (100, "three")):
        disk = opened(model_at("a/b", commit), tmp_path)
        assert disk is not None
        names.append(disk.path.name)
        disk.close()
        os.utime(disk.path, (time.time() - seconds,) * 2)
    assert {path.name for path in tmp_path.glob("*.tier")} == set(names[1:])


def test_a_sweep_dates_its_own_file_and_removes_what_is_old(tmp_path: Path) -> None:
    from kvgraph.hooks.tiers.host import DiskOrphans, DiskSweep

    own, other = tmp_path / "kvgraph-a-b-0-0.tier", tmp_path / "kvgraph-a-c-0-0.tier"
    for path in (own, other):
        path.write_bytes(b"")
    aged(tmp_path, 1e6)
    sweep = DiskSweep(own, DiskOrphans(tmp_path, "kvgraph-a-b-"), period_s=0.01)
    deadline = time.monotonic() + 20
    while other.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sweep.close()
    assert time.time() - own.stat().st_mtime < 1000


def test_more_memory_than_there_is_for_all_workers_is_capped_in_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from kvgraph.hooks.vllm.tiers.worker import granted_bytes

    there, most = available_bytes(), 1 << 50
    assert 0 < granted_bytes(TierSettings(most, sharers=4)) <= 1.1 * there / 4
    assert "each of the 4 workers that share this machine" in caplog.text
    assert granted_bytes(TierSettings(1 << 20, sharers=4)) == 1 << 20


@pytest.mark.parametrize(("algorithm", "length"), [("sha256", 32), ("sha256_cbor", 32)])
def test_the_length_of_hashes_is_asked_for(algorithm: str, length: int) -> None:
    from kvgraph.hooks.vllm.tiers.worker import hash_bytes

    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    assert hash_bytes(config) == length
