"""Pages for users: links lead somewhere, commands exist, and the configuration is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvgraph.advisor.cli import build_app
from kvgraph.advisor.config.config import load

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / f"{name}.md"
    for name in ("README", "ARCHITECTURE", "SECURITY", "CONTRIBUTING", "CHANGELOG")
]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in found}


def broken(page: Path) -> list[str]:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    wrong = []
    for link in links:
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not broken(page)


def test_every_page_is_reached_from_another() -> None:
    texts = {page: page.read_text() for page in PAGES}
    texts[ROOT / "mkdocs.yml"] = (ROOT / "mkdocs.yml").read_text()

    def is_reached(page: Path) -> bool:
        said = (f"{page.name})", f": {page.as_posix().removeprefix(f'{ROOT.as_posix()}/docs/')}\n")
        return any(word in text for at, text in texts.items() for word in said if at != page)

    assert [page.name for page in PAGES[1:] if not is_reached(page)] == []


def test_the_configuration_that_is_shown_is_read(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/configure.md").read_text(), re.DOTALL)
    path = tmp_path / "shown.toml"
    path.write_text(shown)
    assert load(path).sidecar.endpoint == "ipc:///run/kvgraph/sidecar.sock"


def shown(page: Path) -> list[str]:
    """Lines of code on a page: fenced, indented, or within a sentence."""
    text = page.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in fenced for line in block.splitlines()]
    return lines + [a or b for a, b in re.findall(r"`([^`\n]+)`|^ {4}(.+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_exist(page: Path) -> None:
    app = build_app(None)
    known = {
        each.name or getattr(each.callback, "__name__", "") for each in app.registered_commands
    }
    known |= {str(each.name) for each in app.registered_groups}
    said = {name for line in shown(page) for name in re.findall(r"^kvgraph ([a-z]+)\b", line)}
    assert said - known == set()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = {name for line in shown(page) for name in re.findall(r"^make ([a-z-]+)", line)}
    assert made - set(targets) == set()
