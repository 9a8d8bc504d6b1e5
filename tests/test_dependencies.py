"""The dependency order of the folders and of the rooms within them, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "graph": {"_graph"},  # its loops, compiled
    "kernels": set(),
    "dashboards": {"graph"},
    "advisor": {"graph", "dashboards"},
    "hooks": {"graph", "kernels"},
}
# What a folder may not pull in from outside: the sidecar needs no torch, an engine no web server.
FORBIDDEN = {
    "graph": {"torch", "vllm", "fastapi", "zmq"},
    "kernels": {"vllm", "fastapi", "zmq"},
    "dashboards": {"torch", "vllm"},
    "advisor": {"torch", "vllm"},
    "hooks": {"fastapi", "uvicorn", "usearch", "networkx"},
}
# What the kernels need from outside of Python's own library, and nothing else.
KERNELS_NEED = {"torch", "numpy", "cuda"}
FOLDERS = [folder for folder in ALLOWED if (ROOT / folder).is_dir()]


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names that a file imports, relative ones resolved from ``kvgraph``."""
    return imports_of(ast.parse(path.read_text()), path)


def imports_of(tree: ast.AST, path: Path) -> Iterator[str]:
    inside = ("kvgraph", *path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level] if node.level else ()
            stem = [*base, *(node.module or "").split(".")]
            yield from (".".join([*filter(None, stem), alias.name]) for alias in node.names)


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_the_order_allows(folder: str) -> None:
    for path in sources(folder):
        for name in imports(path):
            if name.startswith("kvgraph."):
                target = name.split(".")[1]
                assert target == folder or target in ALLOWED[folder] or target == "__version__", (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folders_do_not_pull_in_what_their_process_must_not_need(folder: str) -> None:
    for path in sources(folder):
        outside = {name.split(".")[0] for name in imports(path)}
        assert not outside & FORBIDDEN[folder], f"{path.relative_to(ROOT)}"


def test_kernels_need_torch_numpy_and_cuda_core_alone() -> None:
    """All of them import where nothing else of ours is installed."""
    outside = {name.split(".")[0] for path in sources("kernels") for name in imports(path)}
    assert outside - sys.stdlib_module_names - {"kvgraph", "_typeshed"} == KERNELS_NEED
    modules = [
        ".".join(["kvgraph", *path.relative_to(ROOT).with_suffix("").parts])
        for path in sources("kernels")
    ]
    code = f"""
import importlib, sys
missing = ("msgspec", "zmq", "orjson", "vllm", "typer", "rich", "fastapi", "prometheus_client")
sys.modules.update(dict.fromkeys(missing))
for name in {modules!r}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_our_packages_import_each_other_relatively() -> None:
    for folder in FOLDERS:
        for path in sources(folder):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    assert not (node.module or "").startswith("kvgraph"), str(path)


def test_only_the_hooks_for_vllm_import_vllm() -> None:
    for folder in FOLDERS:
        for path in sources(folder):
            outside = {name.split(".")[0] for name in imports(path)}
            assert "vllm" not in outside or path.is_relative_to(ROOT / "hooks" / "vllm"), str(path)


def room_of(path: Path) -> str:
    """A folder that holds no other, or else each of its files: those may stand on any floor."""
    has_rooms = any(each.is_dir() and any(each.glob("*.py")) for each in path.parent.iterdir())
    return str((path if has_rooms else path.parent).relative_to(ROOT))


def needed(path: Path) -> Iterator[Path]:
    """Our files that a file imports, at its head or later; not what only a type checker reads."""
    tree = ast.parse(path.read_text())
    for node in [each for each in ast.walk(tree) if isinstance(each, ast.If)]:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for name in imports_of(tree, path):
        place = ROOT.joinpath(*name.split(".")[1:])
        for file in (place.with_suffix(".py"), place.parent.with_suffix(".py")):
            if name.startswith("kvgraph.") and file.is_file():
                yield file
                break


@pytest.mark.parametrize("folder", FOLDERS)
def test_rooms_import_one_way(folder: str) -> None:
    order: dict[str, set[str]] = {}
    for path in sources(folder):
        below = order.setdefault(room_of(path), set())
        below |= {room_of(file) for file in needed(path)} - {room_of(path)}
    try:
        TopologicalSorter(order).prepare()
    except CycleError as error:
        pytest.fail(f"rooms in a circle: {' → '.join(reversed(error.args[1]))}")
