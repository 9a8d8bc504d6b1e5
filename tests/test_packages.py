"""The house: which folders there are, how much stands in one, and no two rooms of one name."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "tests" / "bench"
PRODUCT = ("graph", "kernels", "dashboards", "advisor", "hooks")

FILES = 13  # in a folder, at most
CLASS_LINES, FUNCTION_LINES = 200, 40
NAMED_ALIKE = {"cli.py", "errors.py", "__init__.py"}

# What is longer, to be split. A number may only fall; what is short enough leaves the list.
TOO_LONG: dict[str, int] = {}

# Private attributes of our own objects and modules that tests and benches touch, by name or as a
# string. The number may only fall, and would have to stay below 20.
PRIVATES = 11
THEIRS = {
    "_replace", "_fields", "_fields_",  # Python's: of named tuples, and of ctypes' structures
    "_sleep",  # torch.cuda's
    "_all_token_ids", "_registry", "_expected_finished_count", "_init_executor",
    "_spin_condition", "_C_cache_ops", "_graphs_captured",
    "_preempt_request",  # vLLM's, as those before
}  # fmt: skip
BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "object"}  # the last: of ``mock.patch``


def python_files() -> list[Path]:
    """All that is ours."""
    folders = (*PRODUCT, "tests", "examples")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted([*ROOT.glob("*.py"), *inside])


def product_folders() -> dict[str, Path]:
    """Folders with Python in them, by the name of their package."""
    folders = {path.parent for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")}
    found = {".".join(["kvgraph", *each.relative_to(ROOT).parts]): each for each in folders}
    for each in {path.parent for path in BENCH.rglob("*.py")}:
        found[".".join(["kvgraph", "bench", *each.relative_to(BENCH).parts])] = each
    return {"kvgraph": ROOT, **found}


def test_every_folder_with_python_is_packaged_and_nothing_else() -> None:
    """An editable install finds a folder that the wheel would lack."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(tools["packages"]) == sorted(product_folders())
    assert len(tools["packages"]) == len(set(tools["packages"]))
    roots = tools["package-dir"]
    for name, folder in product_folders().items():
        stem, rest = name, []
        while stem not in roots:
            stem, _, last = stem.rpartition(".")
            rest.insert(0, last)
        assert ROOT.joinpath(roots[stem], *rest) == folder, name


@pytest.mark.parametrize("name", sorted(product_folders()))
def test_every_package_says_what_it_is_for(name: str) -> None:
    face = product_folders()[name] / "__init__.py"
    assert face.is_file(), f"{name} has no __init__.py"
    said = ast.get_docstring(ast.parse(face.read_text()))
    assert said, f"{name} says nothing"
    assert len(said) > 40, f"{name} says only {said!r}"


def test_no_folder_is_crowded() -> None:
    crowds = Counter(path.parent for path in python_files())
    crowded = {str(folder.relative_to(ROOT)): n for folder, n in crowds.items() if n > FILES}
    assert crowded == {}


def test_a_file_is_found_by_its_name() -> None:
    names = Counter(path.name for path in python_files() if path.name not in NAMED_ALIKE)
    assert {name for name, n in names.items() if n > 1} == set()


def lengths(path: Path) -> Iterator[tuple[str, int, int]]:
    """``(file:name, lines, allowed)`` of what a file defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            allowed = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            name = f"{path.relative_to(ROOT)}:{node.name}"
            yield name, node.end_lineno - node.lineno + 1, allowed


def test_nothing_grows_too_long() -> None:
    found = {
        name: lines
        for path in python_files()
        for name, lines, allowed in lengths(path)
        if lines > allowed
    }
    longer = {name: n for name, n in found.items() if n > TOO_LONG.get(name, 0)}
    assert longer == {}, "split it; nothing new goes on the list"
    assert set(TOO_LONG) == set(found), "what is short enough leaves the list"


def privates(path: Path) -> Iterator[str]:
    """``file:line name`` of each private attribute of another object that a file touches."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = touched(node)
        if name.startswith("_") and not name.startswith("__") and name not in THEIRS:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {name}"  # type: ignore[attr-defined]


def touched(node: ast.AST) -> str:
    """The attribute that an expression names, itself or as a string; empty if there is none."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls", "os", "sys"}
        return "" if own else node.attr
    if isinstance(node, ast.Call) and len(node.args) > 1:
        called, name = node.func, node.args[1]
        asks = getattr(called, "attr", getattr(called, "id", "")) in BY_NAME
        if asks and isinstance(name, ast.Constant) and isinstance(name.value, str):
            return name.value
    return ""


def test_tests_and_benches_leave_what_is_private_alone() -> None:
    found = sorted(at for path in (ROOT / "tests").rglob("*.py") for at in privates(path))
    assert len(found) == PRIVATES, "\n".join(found)
