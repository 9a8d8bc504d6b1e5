"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with its tokenizer, written once a session."""
    from kvgraph.bench.model import TINY, ensure_model

    return ensure_model(TINY, tmp_path_factory.mktemp("model") / "tiny")
