"""The cache of compiled kernels: built once, whole or not at all, whoever asks at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvgraph.kernels.compilers import CACHE_ENV, compiled
from kvgraph.kernels.errors import BuildError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_many_who_ask_at_once_build_once() -> None:
    builds = []

    def build(path: Path) -> None:
        builds.append(path)
        path.write_text("machine code")

    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: compiled("k.so", ["source"], build), range(32)))
    assert len(builds) == 1
    assert [path.read_text() for path in paths] == ["machine code"]
    compiled("k.so", ["another source"], build)
    assert len(builds) == 2


def test_a_build_that_fails_leaves_nothing_behind(cache: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half of the machine co")
        raise BuildError("the compiler died")

    with pytest.raises(BuildError, match="died"):
        compiled("k.so", ["source"], fail)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    made = compiled("k.so", ["source"], lambda path: path.touch())
    assert made.exists()
    assert cache.stat().st_mode & 0o077 == 0
