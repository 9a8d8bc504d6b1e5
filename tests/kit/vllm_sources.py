"""What releases of vLLM have under the names that the hooks rely on, read from their sources.

    python tests/kit/vllm_sources.py 0.31.0 0.33.0

fetches these releases with pip, reads them without importing anything, and keeps names and
parameters, no code, in ``vllm_releases.json`` beside this file. Run it again, with all releases
that are kept, when the table of what is relied on has grown.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kvgraph.hooks.vllm.relied_on import RELIED_ON, VALUE, Need, Shape

KEPT = Path(__file__).with_name("vllm_releases.json")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_PROPERTIES = {"property", "cached_property", "functools.cached_property", "abstractproperty"}


class Sources:
    """A vLLM's Python files; ``root`` holds its folder ``vllm``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module] = {}

    def shape_of(self, need: Need) -> Shape:
        """What stands under a name, as ``live_shape`` would find it in an installed vLLM."""
        first, *rest = need.path.split(".")
        found = self._defined(need.module, first)
        for name in rest:
            if found is None:
                return None
            module, node = found
            found = self._member(module, node, name)
        return None if found is None else _shape(found[1])

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self._root.joinpath(*module.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if not file.is_file():
                return None
            self._trees[module] = ast.parse(file.read_text())
        return self._trees[module]

    def _defined(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        tree = self._tree(module)
        for node in _statements(tree.body) if tree is not None else ():
            if name in _names(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._defined(self._origin(module, node), alias.name)
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self._root.joinpath(*module.split(".")).is_dir()
        around = [*module.split("."), "__init__"] if package else module.split(".")
        return ".".join([*around[: -node.level], *filter(None, [node.module])])

    def _member(self, module: str, node: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        """The node that gives a class, or one above it, an attribute."""
        if not isinstance(node, ast.ClassDef):
            return None
        for each in _statements(node.body):
            if name in _names(each):
                return module, each
            if isinstance(each, Function) and each.name == "__init__" and name in _stored(each):
                return module, ast.Pass()
        for base in node.bases:
            above = self._defined(module, base.id) if isinstance(base, ast.Name) else None
            if above is not None and (found := self._member(*above, name)) is not None:
                return found
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a body, with what stands under conditions in it; definitions before imports."""
    inside: list[ast.stmt] = []
    for node in body:
        inside += [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]
    yield from sorted(inside, key=lambda node: isinstance(node, ast.ImportFrom))


def _names(node: ast.stmt) -> set[str]:
    """What a statement defines."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _stored(init: Function) -> set[str]:
    """Attributes that a constructor stores."""
    return {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def _shape(node: ast.AST) -> Shape:
    if not isinstance(node, Function):
        return VALUE
    if any(ast.unparse(each) in _PROPERTIES for each in node.decorator_list):
        return VALUE
    return tuple(name for name in _parameters(node.args) if name not in ("self", "cls"))


def _parameters(args: ast.arguments) -> Iterator[str]:
    placed = [*args.posonlyargs, *args.args]
    required = len(placed) - len(args.defaults)
    for at, each in enumerate(placed):
        yield each.arg if at < required else f"{each.arg}="
    if args.vararg is not None:
        yield f"*{args.vararg.arg}"
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield each.arg if default is None else f"{each.arg}="
    if args.kwarg is not None:
        yield f"**{args.kwarg.arg}"


def kept_releases() -> dict[str, dict[str, Shape]]:
    """Name → shape, by release, as they were read last."""
    releases = json.loads(KEPT.read_text())
    return {
        release: {name: None if each is None else tuple(each) for name, each in shapes.items()}
        for release, shapes in releases.items()
    }


def read_release(root: Path) -> dict[str, Shape]:
    """Name → shape of everything that is relied on."""
    sources = Sources(root)
    return {need.name: sources.shape_of(need) for need in RELIED_ON}


def _fetch(release: str, folder: Path) -> Path:
    """A release's Python files, unpacked; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "--dest", str(folder), f"vllm=={release}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(folder / "unpacked", names)
    return folder / "unpacked"


def main(releases: list[str]) -> None:
    """Read these releases anew, and keep no others."""
    found = {}
    for release in releases:
        with tempfile.TemporaryDirectory(prefix="kvgraph-vllm-") as folder:
            found[release] = read_release(_fetch(release, Path(folder)))
    lines = [f'"{release}": {{\n{_lines(shapes)}\n}}' for release, shapes in found.items()]
    KEPT.write_text("{" + ",\n".join(lines) + "}\n")


def _lines(shapes: dict[str, Shape]) -> str:
    return ",\n".join(f'"{name}": {json.dumps(each)}' for name, each in shapes.items())


if __name__ == "__main__":
    main(sys.argv[1:])
