"""Pages for users: links lead somewhere, commands exist, and the configuration is read."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import kvgraph
import pytest
from kvgraph.advisor.cli import build_app
from kvgraph.advisor.config.config import Config, load

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


PRODUCT = ("graph", "kernels", "dashboards", "advisor", "hooks")
# Handed by an engine to the sidecar that it starts; nobody sets it.
INTERNAL = {"AITHER_KVCACHE_CHILD"}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_key_of_the_configuration_has_a_meaning(reference: ModuleType) -> None:
    said = reference.configuration()
    for name, section in Config.model_fields.items():
        assert f"## `[{name}]`" in said
        for key in section.annotation.model_fields:  # type: ignore[union-attr]
            assert f"| `{key}` |" in said or f"[{name}.{key}]" in said


def test_a_key_without_a_meaning_ends_the_build(reference: ModuleType) -> None:
    class Mute(kvgraph.ObserveConfig):
        """It says nothing of its keys."""

    with pytest.raises(LookupError, match=r"\[mute\].*endpoint"):
        reference._section("mute", Mute)


def test_each_variable_of_the_engine_has_a_meaning(reference: ModuleType) -> None:
    said = reference.variables() + (ROOT / "docs/reference/engine.md").read_text()
    sources = "".join(file.read_text() for top in PRODUCT for file in (ROOT / top).rglob("*.py"))
    read = set(re.findall(r"AITHER_KVCACHE_[A-Z]+(?:_[A-Z]+)*", sources)) - INTERNAL
    assert {name for name in read if not re.search(rf"\b{name}\b", said)} == set()


def test_metrics_paths_and_commands_are_told(reference: ModuleType) -> None:
    assert "| `kvgraph_admission_released_total` | counter | `engine`, `reason` |" in (
        reference.metrics()
    )
    assert "kvgraph_ingest_total" in reference.metrics()
    paths = reference.http()
    assert "| `GET /v1/requests` | read | `limit`, " in paths
    assert "| `POST /v1/intents` | edit | body: [`IntentWishes`](#intentwishes) |" in paths
    assert "## kvgraph serve" in reference.commands()


def test_every_public_name_is_told(reference: ModuleType) -> None:
    said = reference.python()
    assert [name for name in kvgraph.__all__ if not re.search(rf"\.{name}$", said, re.M)] == []
