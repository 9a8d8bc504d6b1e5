"""Which packages there are: all of them are shipped."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "tests" / "bench"
PRODUCT = ("graph", "kernels", "dashboards", "advisor", "hooks")


def product_folders() -> dict[str, Path]:
    """Folders with Python in them, by the name of their package."""
    folders = {path.parent for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")}
    found = {".".join(["kvgraph", *each.relative_to(ROOT).parts]): each for each in folders}
    for each in {path.parent for path in BENCH.rglob("*.py")}:
        found[".".join(["kvgraph_bench", *each.relative_to(BENCH).parts])] = each
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
