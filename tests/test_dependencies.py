"""The dependency order of the folders, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "graph": set(),
    "kernels": set(),
    "dashboards": {"graph"},
    "advisor": {"graph", "dashboards"},
    "hooks": {"graph", "kernels"},
}
# What a folder may not pull in from outside: the sidecar needs no torch, an engine no web server.
FORBIDDEN = {
    "graph": {"torch", "vllm", "fastapi", "zmq"},
    "dashboards": {"torch", "vllm"},
    "advisor": {"torch", "vllm"},
    "hooks": {"fastapi", "uvicorn", "usearch", "networkx"},
}
FOLDERS = [folder for folder in ALLOWED if (ROOT / folder).is_dir()]


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names that a file imports, relative ones resolved from ``kvgraph``."""
    inside = ("kvgraph", *path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
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


def test_our_packages_import_each_other_relatively() -> None:
    for folder in FOLDERS:
        for path in sources(folder):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    assert not (node.module or "").startswith("kvgraph"), str(path)
