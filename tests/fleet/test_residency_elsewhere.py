"""A router asks a real sidecar that is not this user's on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.fleet.command import sidecars_with
from kvgraph.advisor.fleet.residency import ResidencyView
from kvgraph.advisor.fleet.router import Holdings
from kvgraph.advisor.tools.remote import TOKEN_VARIABLE
from page_sidecar import TOKEN, PageSidecar

ELSEWHERE = "agent-01"


def looked(url: str) -> ResidencyView:
    async def look() -> ResidencyView:
        view = ResidencyView(sidecars_with([url]))
        await view.poll()
        return view

    return asyncio.run(look())


@pytest.fixture
def another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process sees no note of the sidecar."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.usefixtures("another_machine")
def test_a_named_sidecar_tells_what_its_engine_holds(
    busy_sidecar: PageSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    view = looked(busy_sidecar.url)
    assert view.silent == {busy_sidecar.url: None}
    assert len(view) == 12
    view.note_home(ELSEWHERE, 1)
    nothing = np.zeros(2, dtype=np.int64)
    told = view.corrected(ELSEWHERE, Holdings(nothing, nothing, lost=np.ones(2, dtype=np.bool_)))
    assert told.lost.tolist() == [True, True]
    assert told.pool[0] == 0
    assert told.copied[1] > 0


@pytest.mark.usefixtures("another_machine")
def test_a_wrong_token_is_named_with_its_remedy(
    busy_sidecar: PageSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    view = looked(busy_sidecar.url)
    assert view.silent == {
        busy_sidecar.url: "answers 401: its token is not KVGRAPH_SIDECAR__TOKEN's"
    }
    assert len(view) == 0
