"""Which packages there are: all of them are shipped."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "tests" / "bench"
PRODUCT = ("graph", "kernels", "dashboards", "advisor", "hooks")


def product_folders() -> dict[str, Path]:
    """Folders with Python in them, by the name of their package."""
    folders = {path.parent for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")}
    found = {".".join(["kvgraph", *each.relative_to(ROOT).parts]): each for each in folders}
    return {"kvgraph": ROOT, **found}


def bench_folders() -> dict[str, Path]:
    """The same of the distribution `kvgraph-bench`, without what a build of it leaves there."""
    parts = {path.parent.relative_to(BENCH).parts for path in BENCH.rglob("*.py")}
    return {
        ".".join(["kvgraph_bench", *each]): BENCH.joinpath(*each)
        for each in parts
        if each[:1] != ("build",)
    }


@pytest.mark.parametrize(("project", "folders"), [(ROOT, product_folders), (BENCH, bench_folders)])
def test_every_folder_with_python_is_packaged_and_nothing_else(
    project: Path, folders: Callable[[], dict[str, Path]]
) -> None:
    """An editable install finds a folder that the wheel would lack."""
    tools = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(tools["packages"]) == sorted(folders())
    ((name, _),) = tools["package-dir"].items()
    assert tools["package-dir"] == {name: "."}
    for package, folder in folders().items():
        assert project.joinpath(*package.split(".")[1:]) == folder, package
