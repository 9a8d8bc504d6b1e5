"""Pages for users: links lead to files and headings that exist, and configurations are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvgraph.advisor.config.config import load

ROOT = Path(__file__).parent.parent
NAMES = ("README", "CONTRIBUTING", "ARCHITECTURE", "SECURITY", "CHANGELOG")
PAGES = [ROOT / f"{name}.md" for name in NAMES]
PAGES += sorted((ROOT / "docs").glob("*.md"))


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

    def is_reached(page: Path) -> bool:
        return any(f"{page.name})" in text for at, text in texts.items() if at != page)

    assert [page.name for page in PAGES[2:] if not is_reached(page)] == []  # people start at two


def test_the_configuration_that_the_readme_shows_is_read(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "shown.toml"
    path.write_text(shown)
    assert load(path).sidecar.endpoint == "ipc:///run/kvgraph/sidecar.sock"
