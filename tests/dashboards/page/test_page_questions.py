"""What people do on the page: take edges away, follow a miss, go on after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvgraph.hooks.fake import FakeEngine
from page_browser import Visit
from page_sidecar import BLOCK, PageSidecar, serve_agents

Begin = Callable[..., Visit]

AWAY = ("Failed to load resource", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")


def open_page(visit: Begin, sidecar: PageSidecar) -> Visit:
    begun = visit()
    begun.page.goto(sidecar.address)
    begun.page.get_by_text("live", exact=True).wait_for()
    return begun


def test_an_edge_type_is_taken_away_and_comes_back(visit: Begin, busy_sidecar: PageSidecar) -> None:
    opened = open_page(visit, busy_sidecar)
    page = opened.show("graph")
    canvas = page.locator("canvas")
    canvas.wait_for()
    opened.until("performance.getEntriesByName('kvgraph:painted').length > 0")
    page.wait_for_timeout(800)
    switch = page.get_by_role("switch", name="prefix share")
    before = canvas.screenshot()
    switch.click(force=True)
    opened.until("window.location.hash.includes('hide=prefix_share')")
    page.wait_for_timeout(500)
    assert canvas.screenshot() != before
    switch.click(force=True)
    opened.until("!window.location.hash.includes('hide')")
    assert opened.faults == []


def test_a_miss_is_followed_to_its_reason(visit: Begin, busy_sidecar: PageSidecar) -> None:
    opened = open_page(visit, busy_sidecar)
    page = opened.show("misses")
    page.locator(".requests button", has_text="evicted").first.click()
    reason = page.locator(".opened .reason")
    reason.wait_for()
    assert "left the pool" in reason.inner_text()
    reason.get_by_role("link", name="its eviction").click()
    page.locator("tr[aria-selected=true]").wait_for()
    assert opened.faults == []


def test_a_block_explains_itself(visit: Begin, busy_sidecar: PageSidecar) -> None:
    opened = open_page(visit, busy_sidecar)
    page = opened.show("graph?as=table&q=agent-03")
    page.locator(".table button").first.click()
    block = page.get_by_role("complementary", name="Block", exact=True)
    block.get_by_text("Its score").wait_for()
    block.get_by_text("What happened to it").wait_for()
    assert opened.faults == []


def test_a_slow_request_is_found_and_says_what_would_have_made_it_fast(
    visit: Begin, busy_sidecar: PageSidecar
) -> None:
    opened = open_page(visit, busy_sidecar)
    page = opened.show("misses")
    page.get_by_text("slowest", exact=True).click()
    opened.until("window.location.hash.includes('order=slowest')")
    page.get_by_role("textbox", name="Search requests").fill("AGENT-05")
    opened.until("document.querySelectorAll('.requests > li').length === 4")
    assert {each.inner_text() for each in page.locator(".requests .who").all()} == {"agent-05"}
    page = opened.show("misses?order=slowest&find=AGENT-05&reason=evicted")
    page.locator(".requests button").first.click()
    page.locator(".opened .remedy").wait_for()
    page.locator(".opened").get_by_text("Measured on this traffic:").wait_for()  # asked for apart
    said = page.locator(".opened").inner_text()
    assert "It took" in said
    assert "A pool larger by at most 22 blocks, or host memory for copies" in said
    assert "Measured on this traffic: a pool twice as large under LRU finds" in said
    assert "had been in this pool before" in said
    assert opened.faults == []


def test_a_request_that_is_not_among_the_last_is_shown_all_the_same(
    visit: Begin, busy_sidecar: PageSidecar
) -> None:
    opened = open_page(visit, busy_sidecar)
    page = opened.show("misses?session=agent-03&request=1")
    page.locator(".opened").wait_for()
    assert page.locator(".requests [data-open=true] .who").inner_text() == "agent-01"
    assert opened.faults == []


def test_the_page_survives_a_restart(visit: Begin, page_sidecar: PageSidecar) -> None:
    with FakeEngine(page_sidecar.endpoint, 160, BLOCK, "engine-one") as engine:
        time.sleep(0.5)
        serve_agents(engine, ["one", "two"], turns=1)
        opened = open_page(visit, page_sidecar)
        page = opened.show("engines")
        page.get_by_role("heading", name="engine-one").wait_for()
        page_sidecar.stop()
        page.get_by_text("sidecar away").wait_for()
        assert page.get_by_role("heading", name="engine-one").count() == 1, "what is known stays"
        page_sidecar.start()
        page.get_by_text("live", exact=True).wait_for()
        page = opened.show("sessions")
        three = page.get_by_text("three", exact=True).first
        until = time.monotonic() + 15.0
        while not three.is_visible() and time.monotonic() < until:
            # What is asked before the engine is linked again is heard by nobody.
            serve_agents(engine, ["three"], turns=1)
            page.wait_for_timeout(500)
        three.wait_for()
    assert [fault for fault in opened.faults if not any(each in fault for each in AWAY)] == []


def test_what_happens_is_shown_without_asking_for_all_again(
    visit: Begin, page_sidecar: PageSidecar
) -> None:
    with FakeEngine(page_sidecar.endpoint, 40, BLOCK, "engine-one") as engine:
        serve_agents(engine, ["agent-00", "agent-01"], turns=2)
        opened = open_page(visit, page_sidecar)
        asked: list[str] = []
        page = opened.show("misses")
        rows = page.locator(".requests > li")
        page.wait_for_function("document.querySelectorAll('.requests > li').length === 4")
        page.on("request", lambda request: asked.append(request.url))
        engine.run(list(range(9 * BLOCK)), "newcomer")
        rows.filter(has_text="newcomer").wait_for()
        assert not [url for url in asked if "/v1/requests" in url], "the stream told of it"
        page = opened.show("sessions?session=agent-01&tenant=agent-01")
        turns = page.get_by_role("region", name="Session agent-01").locator("dl").first
        turns.get_by_text("2", exact=True).first.wait_for()
        serve_agents(engine, ["agent-00", "agent-01"], turns=3)
        turns.get_by_text("5", exact=True).first.wait_for()
        page = opened.show("evictions?tab=log")
        log = page.get_by_role("region", name="Evictions").locator("tbody tr")
        log.first.wait_for()
        known = log.count()
        asked.clear()
        engine.run(list(range(5000, 5000 + 30 * BLOCK)), "another")
        opened.until(f"document.querySelectorAll('td.why').length > {known}")
        logs = [url for url in asked if "/v1/evictions" in url]
        assert logs
        assert all("after=" in url for url in logs)
        assert opened.faults == []
