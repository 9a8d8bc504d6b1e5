"""A real vLLM that plays recorded agents beside a sidecar: every view of the page, in a browser."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvgraph_bench.recorded.agents_requests import SESSIONS
from kvgraph_bench.serving.model import ModelShape, ensure_model
from page_browser import Visit, serious_faults
from page_sidecar import PageSidecar
from waiting import until

pytestmark = pytest.mark.engine
FIRST, MORE = 50, 10  # requests: before the page is opened, and after the sidecar's restart
SHAPE = ModelShape(hidden=128, layers=2, heads=2, kv_heads=2, intermediate=384)
SCREENSHOTS = "KVGRAPH_SCREENSHOTS"  # a folder to write pictures of the views to
VIEWS = ("now", "graph", "misses", "evictions", "evictions?tab=log", "whatif", "weights",
         "sessions", "engines")  # fmt: skip
AWAY = ("Failed to load resource", "ERR_CONNECTION", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESP")


class Agents:
    """Recorded agents on a real engine, linked to a sidecar that the page may change."""

    def __init__(self, sidecar: PageSidecar, config: Path, allowed: Path, engine: Any) -> None:
        self.sidecar, self.config, self.engine = sidecar, config, engine
        self._allowed = allowed
        self._served = 0

    def serve(self, count: int) -> None:
        """Let them ask so many times more, and wait until the sidecar has heard of it."""
        self._served += count
        self._allowed.write_text(str(self._served))
        patience = time.monotonic() + 240
        while self.finished() < count:
            if not self.engine.running:
                self.engine.run()
            assert time.monotonic() < patience, "the engine does not serve"
            time.sleep(0.3)

    def finished(self) -> int:
        """Requests in the sidecar's log that are over."""
        requests = self.sidecar.get("/v1/requests?limit=1000")["requests"]
        return sum(each["finished"] is not None for each in requests)

    def end(self) -> None:
        self._allowed.write_text("end")


@pytest.fixture
def agents(
    configured_sidecar: tuple[PageSidecar, Path], new_engine: Any, tmp_path: Path
) -> Iterator[Agents]:
    sidecar, config = configured_sidecar
    allowed = tmp_path / "allowed"
    allowed.write_text("0")
    model = ensure_model(SHAPE, tmp_path / "model")
    engine = new_engine(
        "engine_fleet.py",
        {"model": str(model), "sessions": str(SESSIONS), "users": 6, "blocks": 72,
         "vocabulary": SHAPE.vocab, "allowed": str(allowed)},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=sidecar.endpoint,
    )  # fmt: skip
    agents = Agents(sidecar, config, allowed, engine)
    yield agents
    agents.end()
    engine.run(60)


def pictured(page: Any, view: str) -> None:
    """Write a picture of a view, where pictures are wanted."""
    folder = os.environ.get(SCREENSHOTS)
    if folder:
        name = view.partition("?")[0]
        page.screenshot(path=Path(folder) / f"page-{name}.png")


def first_keys(opened: Visit) -> list[str]:
    """The blocks that go next, by the page."""
    page = opened.show("evictions")
    page.locator(".rows tbody tr").first.wait_for()
    return [row.inner_text() for row in page.locator(".rows tbody tr td:nth-child(2)").all()]


def test_the_page_beside_a_real_engine_with_recorded_agents(
    visit: Callable[..., Visit], agents: Agents
) -> None:
    agents.serve(FIRST)
    opened = visit(color_scheme="dark")
    page = opened.page
    page.goto(agents.sidecar.edit_address)
    page.get_by_text("live", exact=True).wait_for()
    for view in VIEWS:
        page = opened.show(view)
        page.wait_for_timeout(600)
        assert serious_faults(page) == {}, view
        assert page.get_by_text("This view failed").count() == 0
        if "tab=log" not in view:
            pictured(page, view)
    edges_come_and_go(opened)
    a_miss_leads_to_its_reason(opened, agents)
    a_weight_changes_the_ranking(opened, agents)
    assert opened.faults == []
    it_goes_on_after_a_restart(opened, agents)
    assert [each for each in opened.faults if not any(word in each for word in AWAY)] == []


def edges_come_and_go(opened: Visit) -> None:
    page = opened.show("graph")
    opened.until("performance.getEntriesByName('kvgraph:painted').length > 0")
    canvas, switch = page.locator("canvas"), page.get_by_role("switch", name="temporal")
    for _ in range(3):  # what the engine did last may still arrive, and then nothing else changes
        whole = opened.still_picture(canvas)
        switch.click(force=True)
        opened.until("window.location.hash.includes('hide=temporal')")
        opened.repaints(canvas, whole)
        switch.click(force=True)
        opened.until("!window.location.hash.includes('hide')")
        patience = time.monotonic() + 15
        while time.monotonic() < patience:
            if canvas.screenshot() == whole:
                return
            page.wait_for_timeout(300)
    raise AssertionError("edges that come back are painted otherwise")


def a_miss_leads_to_its_reason(opened: Visit, agents: Agents) -> None:
    requests = agents.sidecar.get("/v1/requests?limit=1000")["requests"]
    lost = next(each for each in requests if each["miss"]["eviction"] is not None)
    page = opened.show(f"misses?request={lost['id']}")
    reason = page.locator(".opened .reason")
    reason.wait_for()
    assert lost["miss"]["sentence"] in reason.inner_text()
    assert "left the pool" in reason.inner_text()
    pictured(page, "miss")
    reason.get_by_role("link", name="its eviction").click()
    page.locator("tr[aria-selected=true]").wait_for()


def a_weight_changes_the_ranking(opened: Visit, agents: Agents) -> None:
    before = first_keys(opened)
    page = opened.show("weights")
    page.get_by_role("textbox", name="hit count").fill("50")
    page.get_by_text("What this change would do").wait_for()
    page.get_by_role("button", name="Try in a shadow").click()
    page.get_by_text("A shadow has these weights").wait_for()
    page = opened.show("whatif")
    page.get_by_text("with the weights that are tried").wait_for()
    page = opened.show("weights")
    page.get_by_role("textbox", name="hit count").fill("50")
    page.get_by_role("button", name="Apply").click()
    page.get_by_text("Written to").wait_for()
    assert tomllib.loads(agents.config.read_text())["score"]["hit_count"] == 50
    until(lambda: first_keys(opened) != before, "the ranking stays as it was")


def it_goes_on_after_a_restart(opened: Visit, agents: Agents) -> None:
    page = opened.show("misses")
    agents.sidecar.stop()
    page.get_by_text("sidecar away").wait_for()
    assert page.locator(".requests > li").count() > 0, "what is known stays"
    agents.sidecar.start()
    page.get_by_text("live", exact=True).wait_for()
    page = opened.show("engines")
    page.get_by_text("ranks its blocks").first.wait_for()
    agents.serve(MORE)
    page = opened.show("misses")
    page.locator(".requests > li").nth(MORE - 1).wait_for()
    for view in VIEWS:
        opened.show(view)
