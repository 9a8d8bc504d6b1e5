"""ARCHITECTURE and the explanations speak of this tree: what they name is there."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
EXPLANATIONS = sorted((ROOT / "docs" / "explanations").glob("*.md"))
FOLDERS = ("graph", "kernels", "dashboards", "advisor", "hooks", "tests", "examples")
FOREIGN = {"WAITING_FOR_REMOTE_KVS", "None"}  # in backticks, and vLLM's or Python's


@cache
def files() -> list[str]:
    """All but what begins with a dot, or was installed: an environment has a hundred thousand."""
    found: list[str] = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [each for each in below if each[0] != "." and each != "node_modules"]
        found += (f"{folder}/{name}" for name in names)
    return found


@cache
def classes() -> dict[str, set[str]]:
    """Classes of the tree, each with the names of its methods, fields and attributes of self; what
    stands in none is of the class ``""``.
    """
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {"": {name for path in inside for name in (path.stem, path.parent.name)}}
    for path in (*ROOT.glob("*.py"), *inside):
        note(ast.parse(path.read_text()), found[""], found)
    return found


def note(node: ast.AST, own: set[str], found: dict[str, set[str]]) -> None:
    """Every name below a node, which is of the class around it and of those around that."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef):
            below = found.setdefault(each.name, set())
            note(each, below, found)
            own |= below
        else:
            note(each, own, found)
        own |= {str(getattr(each, kind, "")) for kind in ("name", "id", "attr", "arg")}


@pytest.mark.parametrize(
    "page", [ROOT / "ARCHITECTURE.md", *EXPLANATIONS], ids=lambda page: page.name
)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"`([\w/{},]+\.(?:py|cu|cuh|hpp|npz|toml|ts|tsx))`", text))
    wanted = {each for name in named for each in unfolded(name)}
    missing = {name for name in wanted if not any(file.endswith(f"/{name}") for file in files())}
    assert missing == set()
    folders = set(re.findall(r"`((?:graph|kernels|dashboards|advisor|hooks|tests)/[\w/]*)`", text))
    assert {each for each in folders if not (ROOT / each).is_dir()} == set()


def unfolded(name: str) -> list[str]:
    """``a_{b,c}.py`` as its two files."""
    head, brace, rest = name.partition("{")
    if not brace:
        return [name]
    choices, _, tail = rest.partition("}")
    return [head + choice + tail for choice in choices.split(",")]


def test_every_symbol_that_is_named_is_there() -> None:
    named = re.findall(r"`((?:[A-Z]\w*|_[a-zA-Z]\w*)(?:\.\w+)*)`", TEXT)
    ours = {symbol for symbol in named if not re.match(r"AITHER_|.*\.md$", symbol)} - FOREIGN
    assert {symbol for symbol in ours if not set(symbol.split(".")) <= classes()[""]} == set()
    members = {symbol for symbol in ours if symbol.split(".")[0] in classes() and "." in symbol}
    strange = {each for each in members if each.split(".")[1] not in classes()[each.split(".")[0]]}
    assert strange == set()


def path() -> list[tuple[str, str]]:
    """``(file, name)`` of all that is to be read, in order."""
    section = TEXT.split("## A first afternoon\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\S+\.py)` \| (.+?) \|", section, re.MULTILINE)
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
