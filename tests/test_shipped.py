"""What is built: the release is the product alone; benches and their data are another wheel."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import kvgraph
import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "tests" / "bench"
OF_THE_RELEASE = {"advisor", "dashboards", "graph", "hooks", "kernels"}
LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "*.egg-info", "node_modules"
)
MOST_BYTES = 3_000_000  # of a wheel without weights; chosen: twice what it is

BUILD = """
import sys
from setuptools import build_meta
for kind in sys.argv[2:]:
    print(getattr(build_meta, f"build_{kind}")(sys.argv[1]))
"""


def build(source: Path, into: Path, *kinds: str) -> dict[str, Path]:
    """Build as pip does without a network: with the setuptools that is installed. Nothing here is
    about speed, so that what is compiled is not optimised, which takes most of the time.
    """
    compiler = into / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, str(into), *kinds],
        cwd=source, capture_output=True, text=True, timeout=300,
        env={**os.environ, "CC": str(compiler), "CXX": str(compiler)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(kinds, map(into.joinpath, done.stdout.split()[-len(kinds) :]), strict=True))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The release's sdist, a wheel made from it, and the benches' wheel; of a copy of the tree."""
    directory = tmp_path_factory.mktemp("built")
    tree = directory / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    sdist = build(tree, directory, "sdist")["sdist"]
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    unpacked = directory / sdist.name.removesuffix(".tar.gz")
    release = build(unpacked, directory, "wheel")["wheel"]
    bench = build(tree / "tests" / "bench", directory, "wheel")["wheel"]
    return {"sdist": sdist, "release": release, "bench": bench}


def files_of(path: Path) -> list[PurePosixPath]:
    """Its files; those of an sdist from the folder that it unpacks to."""
    if path.suffix == ".whl":
        return [PurePosixPath(name) for name in zipfile.ZipFile(path).namelist()]
    with tarfile.open(path) as archive:
        return [
            PurePosixPath(*PurePosixPath(each.name).parts[1:]) for each in archive if each.isfile()
        ]


def sources(folder: str) -> set[str]:
    """Python files of a folder, without what a build leaves there."""
    files = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    return {str(path) for path in files if "build" not in path.parts}


def test_the_wheel_is_the_product_and_nothing_else(built: Mapping[str, Path]) -> None:
    files = files_of(built["release"])
    ours = [path for path in files if path.parts[0] == "kvgraph"]
    assert {path.parts[0] for path in files} == {
        "kvgraph",
        f"kvgraph-{kvgraph.__version__}.dist-info",
    }
    assert {path.parts[1] for path in ours if len(path.parts) > 2} == OF_THE_RELEASE
    for folder in OF_THE_RELEASE:
        packed = {str(path.relative_to("kvgraph")) for path in ours if path.suffix == ".py"}
        assert sources(folder) <= packed, f"{folder}: an editable install has more"
    assert not [path for path in files if path.suffix in {".safetensors", ".gz", ".jsonl"}]
    assert built["release"].stat().st_size < MOST_BYTES


@pytest.mark.parametrize(
    "name", ["py.typed", "dashboards/page/index.html", "advisor/policies/prior.npz"]
)
def test_the_wheel_has_what_no_python_file_is(built: Mapping[str, Path], name: str) -> None:
    assert PurePosixPath("kvgraph", name) in files_of(built["release"])


def test_the_wheel_has_what_is_compiled_from_the_sdist(built: Mapping[str, Path]) -> None:
    """A part that does not compile is left out without an error, for machines that cannot."""
    packed = {path for path in files_of(built["sdist"]) if path.parts[0] == "core"}
    assert packed == {path.relative_to(ROOT) for path in (ROOT / "core").glob("*/*")}
    names = [path.name for path in files_of(built["release"]) if path.suffix == ".so"]
    assert sorted(name.partition(".")[0] for name in names) == ["_engine", "_graph"]


def test_the_sdist_has_neither_tests_nor_their_data(built: Mapping[str, Path]) -> None:
    files = files_of(built["sdist"])
    assert not [path for path in files if path.parts[0] in {"tests", "docs", "examples"}]
    assert {PurePosixPath("LICENSE"), PurePosixPath("README.md")} <= {*files}
    assert built["sdist"].stat().st_size < MOST_BYTES


def test_the_benches_are_a_wheel_that_adds_nothing_to_the_product(
    built: Mapping[str, Path],
) -> None:
    with zipfile.ZipFile(built["bench"]) as archive:
        names = archive.namelist()
        (entries,) = (name for name in names if name.endswith("entry_points.txt"))
        commands = archive.read(entries).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kvgraph_bench"}
    assert "[kvgraph.commands]" in commands
    assert all(f"{name} = " in commands for name in ("bench", "demo", "selftest"))
    packed = {f"tests/bench/{name.removeprefix('kvgraph_bench/')}" for name in names}
    assert sources("tests/bench") <= packed
    for data in ("sessions", "held_out", "weights"):
        assert {str(path.relative_to(ROOT)) for path in (BENCH / data).rglob("*.*")} <= packed
    assert not [name for name in names if "/results/" in name]


def test_wheel_package_and_installation_say_one_version(built: Mapping[str, Path]) -> None:
    assert built["release"].name.startswith(f"kvgraph-{kvgraph.__version__}-cp3")  # compiled parts
    assert built["sdist"].name == f"kvgraph-{kvgraph.__version__}.tar.gz"
    assert importlib.metadata.version("kvgraph") == kvgraph.__version__, "installed anew?"


WITHOUT_EXTRAS = """
import contextlib, io, sys
missing = (
    "aiohttp bm25s cuda httpx langchain_core langgraph libcachesim matplotlib mooncake networkx"
    " opentelemetry psutil ray tokenizers torch transformers vllm kvgraph_bench"
)
sys.modules.update(dict.fromkeys(missing.split()))
sys.path.insert(0, sys.argv[1])
import kvgraph
assert kvgraph.__file__.startswith(sys.argv[1]), kvgraph.__file__
from kvgraph.advisor.cli import main

def said(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(words)
        except SystemExit as ended:
            return ended.code, " ".join(out.getvalue().split())

code, text = said("--help")
assert code == 0 and "sidecar" in text, text
import kvgraph.advisor.service, kvgraph.hooks.vllm.plugin
for name in kvgraph.__all__:
    if name not in ("ConfKVCache", "LangGraphCallbacks"):
        getattr(kvgraph, name)
for extra, words in {
    "memory": ("memory", "http://127.0.0.1:1", "--budget", "1000"),
    "route": ("route", "http://127.0.0.1:1"),
    "vllm": ("calibrate", "model"),
}.items():
    code, text = said(*words)
    assert code == 1 and f"pip install 'kvgraph[{extra}]'" in text, (words, code, text)
"""


def test_the_wheel_works_where_no_extra_is_installed(
    built: Mapping[str, Path], tmp_path: Path
) -> None:
    """``sys.modules`` has what extras bring as missing; what `kvgraph` depends on is there."""
    zipfile.ZipFile(built["release"]).extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_EXTRAS, str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def folders_of(package: str, root: Path, *below: str) -> dict[str, Path]:
    """Folders with Python in them, by the name of their package; without what a build leaves."""
    files = (path for folder in below for path in (root / folder).rglob("*.py"))
    parts = {path.parent.relative_to(root).parts for path in files}
    return {
        ".".join([package, *each]): root.joinpath(*each)
        for each in parts
        if "build" not in each[:1]
    }


@pytest.mark.parametrize(
    ("project", "folders"),
    [
        (ROOT, {"kvgraph": ROOT, **folders_of("kvgraph", ROOT, *sorted(OF_THE_RELEASE))}),
        (BENCH, folders_of("kvgraph_bench", BENCH, ".")),
    ],
    ids=["product", "benches"],
)
def test_every_folder_with_python_is_packaged_and_nothing_else(
    project: Path, folders: dict[str, Path]
) -> None:
    """An editable install finds a folder that the wheel would lack."""
    tools = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(tools["packages"]) == sorted(folders)
    ((name, _),) = tools["package-dir"].items()
    assert tools["package-dir"] == {name: "."}
    for package, folder in folders.items():
        assert project.joinpath(*package.split(".")[1:]) == folder, package
