"""The reference is written from the code: it says every setting, and nothing goes unsaid."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import kvgraph
import pytest
from kvgraph.advisor.config.config import Config

ROOT = Path(__file__).parent.parent
PRODUCT = ("graph", "kernels", "dashboards", "advisor", "hooks")
# Handed by an engine to the sidecar that it starts; nobody sets it.
INTERNAL = {"AITHER_KVCACHE_CHILD"}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
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
