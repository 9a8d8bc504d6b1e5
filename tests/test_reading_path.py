"""A first afternoon's reading: what ARCHITECTURE tells a newcomer to read is there, and short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def section() -> str:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    return text.split("## A first afternoon\n")[1].split("\n## ")[0]


def path() -> list[tuple[str, str]]:
    """``(file, name)`` of all that is to be read, in order."""
    rows = re.findall(r"^\| `(\S+\.py)` \| (.+?) \|", section(), re.MULTILINE)
    return [(file, name) for file, names in rows for name in re.findall(r"`(\S+?)`", names)]


def defined(node: ast.AST, inside: str = "") -> Iterator[str]:
    """What a module defines, and what its classes do."""
    for each in ast.iter_child_nodes(node):
        target = each.target if isinstance(each, ast.AnnAssign) else each
        name = getattr(target, "id", None) or getattr(target, "name", None)
        if name is not None and isinstance(each, ast.stmt):
            yield inside + name
        if isinstance(each, ast.ClassDef):
            yield from defined(each, f"{each.name}.")


def names_in(file: str) -> set[str]:
    return set(defined(ast.parse((ROOT / file).read_text())))


def test_a_newcomer_reads_the_whole_idea_in_an_afternoon() -> None:
    rooms = [file.split("/")[0] for file, _ in path()]
    assert rooms[0] == "graph", "it begins with an event"
    assert rooms[-1] == "hooks", "it ends at the free queue"
    assert len(path()) == len(set(path()))
    for file, name in path():
        assert name in names_in(file), f"ARCHITECTURE sends a reader to {name}: {file} lacks it"
