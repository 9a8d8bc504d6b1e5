"""A real browser on a live sidecar: every view, questions, reasons, weights."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.tools.terminal import leading_to
from kvgraph.graph.wire.events import (
    AdmissionReport,
    RequestHeld,
    RequestReleased,
)
from kvgraph.hooks.fake import FakeEngine
from page_browser import Visit, serious_faults
from page_sidecar import BLOCK, PageSidecar, serve_agents
from waiting import PATIENCE_S, until

ONE = "sessions?session=agent-01&tenant=agent-01"
VIEWS = ("now", "graph", "misses", "evictions", "evictions?tab=log", "whatif", "weights",
         "sessions", "engines", "sampled", "caches", "graph?as=table", ONE)  # fmt: skip
PHONE = {"width": 390, "height": 844}

Begin = Callable[..., Visit]


def open_page(visit: Begin, sidecar: PageSidecar, **context: str) -> Visit:
    """The page, opened by the address that the sidecar gives."""
    begun = visit(**context)
    begun.page.goto(sidecar.address)
    begun.page.get_by_text("live", exact=True).wait_for()
    return begun


@pytest.fixture
def opened(visit: Begin, busy_sidecar: PageSidecar) -> Visit:
    return open_page(visit, busy_sidecar)


def shows_no_trouble(opened: Visit) -> None:
    page = opened.page
    assert page.get_by_role("alert").filter(has_text="could not be shown").count() == 0
    assert page.get_by_text("This view failed").count() == 0
    assert opened.faults == []


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_without_serious_fault_and_fits_a_phone(opened: Visit, view: str) -> None:
    page = opened.show(view)
    page.wait_for_timeout(300)
    assert serious_faults(page) == {}
    shows_no_trouble(opened)
    page.set_viewport_size(PHONE)
    page = opened.show(view)
    page.wait_for_timeout(200)
    beyond = "() => document.documentElement.scrollWidth - window.innerWidth"
    assert page.evaluate(beyond) <= 0, "it scrolls sideways"


def test_light_is_as_readable_as_dark(visit: Begin, busy_sidecar: PageSidecar) -> None:
    begun = open_page(visit, busy_sidecar, color_scheme="light")
    for view in VIEWS:
        assert serious_faults(begun.show(view)) == {}, view


def test_what_the_model_looks_at_leads_to_the_block(opened: Visit) -> None:
    page = opened.show("sampled")
    looked_at = page.get_by_role("region", name="Blocks that it looks at most").first
    looked_at.get_by_text("rules").first.wait_for()
    page.get_by_role("region", name="How sure it is").first.get_by_text("agent-00").first.wait_for()
    looked_at.locator("a.mono").first.click()
    page.get_by_role("heading", name="Block", exact=True).wait_for()
    shows_no_trouble(opened)


def test_a_cache_is_drawn_with_what_it_holds_and_how_sure_its_model_is(opened: Visit) -> None:
    page = opened.show("caches")
    run = page.get_by_role("region", name="my model").first
    run.get_by_text("64 tokens a layer while it is sure, 256 while not; 400 steps shown").wait_for()
    assert run.get_by_role("img", name="Tokens that a layer of my model holds").count() == 1
    assert run.get_by_role("img", name="How sure my model is").count() == 1
    shows_no_trouble(opened)


EMPTY = {
    "now": "Start one with AITHER_KVCACHE_GRAPH=1",
    "graph": "Send a request to an engine",
    "misses": "As soon as an engine schedules one",
    "evictions": "An engine gets its first ranking",
    "evictions?tab=log": "The pool has had room",
    "weights": "start it with --config",
    "sessions": "Sessions are named by",
    "engines": "Start one with AITHER_KVCACHE_GRAPH=1",
}


def test_without_an_engine_it_says_what_to_do_next(visit: Begin, page_sidecar: PageSidecar) -> None:
    begun = open_page(visit, page_sidecar)
    for view, said in EMPTY.items():
        page = begun.show(view)
        page.get_by_text(said).first.wait_for()
        assert serious_faults(page) == {}, view
    for fed_by_none in ("What if", "Attention", "Caches"):
        assert begun.page.get_by_role("link", name=fed_by_none).count() == 0
    shows_no_trouble(begun)


UNKNOWN = {
    "misses?request=999999": "is no longer in the log",
    "misses?find=nobody-is-called-so": "Take the filters away",
    "evictions?tab=log&eviction=999999": "is no longer in the log",
    "sessions?session=nobody": "Not known here",
    "sessions?q=nobody-is-called-so": "No session is called that",
    "graph?as=table&q=nobody-is-called-so": "Search for a part of a session",
    "graph?layout=unheard-of": "blocks,",
    "no-such-view": "From the cache",
}


@pytest.mark.parametrize("view", UNKNOWN)
def test_what_an_address_names_and_nobody_knows_is_told(opened: Visit, view: str) -> None:
    page = opened.show(view)
    page.get_by_text(UNKNOWN[view]).first.wait_for()
    shows_no_trouble(opened)


def test_who_waits_for_room_is_shown_only_where_somebody_does(
    visit: Begin, page_sidecar: PageSidecar
) -> None:
    begun = open_page(visit, page_sidecar)
    with FakeEngine(page_sidecar.endpoint, 64, 16, "engine-one") as engine:
        page = begun.show("engines")
        card = page.get_by_role("region", name="Engine engine-one")
        card.get_by_text("Connected.").wait_for()
        assert card.get_by_role("group", name="Admission").count() == 0
        engine.client.emit(RequestHeld("request-0", 3, "new", fitting=31, live=38))
        engine.client.emit(RequestReleased("request-0", 12.0, "room"))
        engine.run(list(range(40)), "new", waited_s=12.0)
        engine.client.emit(AdmissionReport(2, 6, 7.5, 3, (1, 0, 0, 0, 0, 0, 0), 12.0, 12.0, 9))
        card.get_by_role("group", name="Admission").get_by_text("until there was room").wait_for()
        assert serious_faults(page) == {}
        page = begun.show("now")
        panel = page.get_by_role("region", name="Waiting for room")
        panel.get_by_text("2 requests wait for room, the first for 7.5 s by now").wait_for()
        panel.get_by_text("1 request of the last 10 min began after a wait").wait_for()
        assert serious_faults(page) == {}
        page = begun.show("misses?request=0")
        page.get_by_text("It was held for 12 s, until there was room: 31 sessions fit").wait_for()
        page.get_by_text("What would have made it faster:").wait_for()
        page.locator(".remedy", has_text="Room for its context").wait_for()
    shows_no_trouble(begun)


def test_a_session_is_shown_as_it_was_and_led_to_by_address_and_keyboard(opened: Visit) -> None:
    page = opened.show(ONE)
    page.get_by_role("heading", name="agent-01").wait_for()
    page.reload()
    page.get_by_role("heading", name="agent-01").wait_for()
    page.get_by_text("Shown as it is now").wait_for()
    page.get_by_role("slider", name="Go back in time").focus()
    page.keyboard.press("Home")
    page.get_by_role("button", name="Back to now").wait_for()
    opened.until("window.location.hash.includes('at=')")
    page.get_by_role("heading", name="What had happened by then").wait_for()
    page.get_by_role("button", name="Back to now").click()
    page.get_by_role("heading", name="What happened").wait_for()
    page.get_by_role("link", name="Misses").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Misses", exact=True).wait_for()
    assert page.url.endswith("#/misses")
    shows_no_trouble(opened)


def test_the_token_is_asked_for_in_words(visit: Begin, busy_sidecar: PageSidecar) -> None:
    stranger = visit()
    stranger.page.goto(busy_sidecar.url)
    stranger.page.get_by_text("kvgraph open").wait_for()


def test_without_webgl2_a_table_stands_in(visit: Begin, busy_sidecar: PageSidecar) -> None:
    begun = visit()
    begun.page.add_init_script("""
        const original = HTMLCanvasElement.prototype.getContext;
        HTMLCanvasElement.prototype.getContext = function (kind, ...rest) {
          return kind === "webgl2" ? null : original.call(this, kind, ...rest);
        };
    """)
    begun.page.goto(busy_sidecar.address)
    page = begun.show("graph")
    page.get_by_role("region", name="Blocks").wait_for()
    assert page.locator("canvas").count() == 0
    assert begun.faults == []


def first_score(opened: Visit) -> str:
    """The score of the block that goes next."""
    page = opened.show("evictions")
    page.locator(".rows tbody tr").first.wait_for()
    text: str = page.locator(".rows tbody tr").first.locator("td b").inner_text()
    return text


def score_in(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(file.read_text()).get("score", {})
    return found


def test_a_weight_is_tried_applied_and_taken_back(
    visit: Begin, configured_sidecar: tuple[PageSidecar, Path]
) -> None:
    sidecar, file = configured_sidecar
    with FakeEngine(sidecar.endpoint, 160, BLOCK, "engine-one") as engine:
        sidecar.links(engine)
        serve_agents(engine, ["one", "two", "three"])
        sidecar.hears_of(12)
        opened = visit()
        page = opened.page
        page.goto(sidecar.edit_address)
        field = page.get_by_role("textbox", name="importance")
        field.wait_for()
        assert page.url.endswith("#/weights"), "the token does not stay in the address"
        before = first_score(opened)

        opened.show("weights")
        field.fill("-500")
        page.get_by_text("What this change would do").wait_for()
        page.get_by_role("button", name="Apply").click()
        page.get_by_text("Written to").wait_for()
        assert score_in(file)["importance"] == -500
        until(lambda: first_score(opened) != before, "no ranking has the new weight")

        opened.show("weights")
        page.get_by_role("button", name="Take the last change back").click()
        page.get_by_text("was taken back").wait_for()
        assert score_in(file) == {}
    assert opened.faults == []


def test_a_refused_change_stays_to_be_mended(
    visit: Begin, configured_sidecar: tuple[PageSidecar, Path]
) -> None:
    sidecar, file = configured_sidecar
    page = visit().page
    page.goto(sidecar.edit_address)
    field = page.get_by_role("textbox", name="importance")
    field.fill("-500")
    apply = page.get_by_role("button", name="Apply")
    apply.click(trial=True)  # as soon as its effect is known
    file.write_text("[score\n")
    apply.click()
    page.get_by_text("Not changed").wait_for()
    assert field.input_value() == "-500"


def test_a_policy_is_chosen_for_the_next_start(
    visit: Begin, configured_sidecar: tuple[PageSidecar, Path]
) -> None:
    sidecar, file = configured_sidecar
    opened = visit()
    page = opened.page
    page.goto(sidecar.edit_address)
    page.get_by_role("radio", name="lifecycle").click()
    page.get_by_text("What this change would do").wait_for()
    page.get_by_role("button", name="Apply").click()
    page.get_by_text("the policy lifecycle ranks from the sidecar's next start on").wait_for()
    assert tomllib.loads(file.read_text())["policy"] == {"name": "lifecycle", "guard": False}
    page.get_by_role("button", name="Take the last change back").click()
    page.get_by_text("was taken back").wait_for()
    assert tomllib.loads(file.read_text())["policy"]["name"] == "classic"
    assert opened.faults == []


def test_without_the_edit_token_nothing_is_changed(
    visit: Begin, configured_sidecar: tuple[PageSidecar, Path]
) -> None:
    sidecar, file = configured_sidecar
    opened = visit()
    opened.page.goto(sidecar.address)
    page = opened.show("weights")
    page.get_by_role("textbox", name="importance").fill("-500")
    page.get_by_text("kvgraph open --edit").wait_for()
    assert page.get_by_role("button", name="Apply").is_disabled()
    assert score_in(file) == {}


def test_the_file_that_a_browser_is_given_leads_to_a_page_that_may_change_weights(
    visit: Begin,
    configured_sidecar: tuple[PageSidecar, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    sidecar, _ = configured_sidecar
    opened = visit()
    with leading_to(sidecar.edit_address) as file:
        opened.page.goto(file.as_uri())
        opened.page.get_by_text("live", exact=True).wait_for()
    assert opened.page.url == f"{sidecar.url}/#/weights", "the token does not stay in the address"
    opened.page.get_by_role("textbox", name="importance").fill("-500")
    opened.page.get_by_role("button", name="Apply").wait_for()
    assert opened.page.get_by_text("kvgraph open --edit").count() == 0
    assert opened.faults == []


AWAY = ("Failed to load resource", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")


def test_an_edge_type_is_taken_away_and_comes_back(opened: Visit) -> None:
    page = opened.show("graph")
    canvas = page.locator("canvas")
    canvas.wait_for()
    opened.until("performance.getEntriesByName('kvgraph:painted').length > 0")
    switch = page.get_by_role("switch", name="prefix share")
    whole = opened.still_picture(canvas)
    switch.click(force=True)
    opened.until("window.location.hash.includes('hide=prefix_share')")
    opened.repaints(canvas, whole)
    switch.click(force=True)
    opened.until("!window.location.hash.includes('hide')")
    assert opened.faults == []


def test_a_miss_is_followed_to_its_reason(opened: Visit) -> None:
    page = opened.show("misses")
    page.locator(".requests button", has_text="evicted").first.click()
    reason = page.locator(".opened .reason")
    reason.wait_for()
    assert "left the pool" in reason.inner_text()
    reason.get_by_role("link", name="its eviction").click()
    page.locator("tr[aria-selected=true]").wait_for()
    assert opened.faults == []


def test_a_block_explains_itself(opened: Visit) -> None:
    page = opened.show("graph?as=table&q=agent-03")
    page.locator(".table button").first.click()
    block = page.get_by_role("complementary", name="Block", exact=True)
    block.get_by_text("Its score").wait_for()
    block.get_by_text("What happened to it").wait_for()
    assert opened.faults == []


def test_a_slow_request_is_found_and_says_what_would_have_made_it_fast(opened: Visit) -> None:
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


@pytest.mark.parametrize(
    ("view", "label"), [("misses", "Search requests"), ("sessions", "Search sessions")]
)
def test_what_is_typed_into_a_search_stays_in_it(opened: Visit, view: str, label: str) -> None:
    page = opened.show(view)
    field = page.get_by_role("textbox", name=label)
    field.click()
    for letter in "AGENT-05":  # each letter asks anew, and the answer may come before the next one
        page.keyboard.press(letter)
        opened.until("document.querySelector('main [aria-busy=true]') === null")
    assert field.input_value() == "AGENT-05"
    page.keyboard.press("Home")
    page.keyboard.type("X-")  # without a pause, and not at the end
    assert field.input_value() == "X-AGENT-05"
    assert opened.faults == []


def test_a_request_that_is_not_among_the_last_is_shown_all_the_same(opened: Visit) -> None:
    page = opened.show("misses?session=agent-03&request=1")
    page.locator(".opened").wait_for()
    assert page.locator(".requests [data-open=true] .who").inner_text() == "agent-01"
    assert opened.faults == []


def test_the_page_survives_a_restart(visit: Begin, page_sidecar: PageSidecar) -> None:
    with FakeEngine(page_sidecar.endpoint, 160, BLOCK, "engine-one") as engine:
        page_sidecar.links(engine)
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
        patience = time.monotonic() + PATIENCE_S
        while not three.is_visible() and time.monotonic() < patience:
            # What is asked before the engine is linked again is heard by nobody.
            serve_agents(engine, ["three"], turns=1)
            page.wait_for_timeout(500)
        three.wait_for()
    assert [fault for fault in opened.faults if not any(each in fault for each in AWAY)] == []


def test_news_are_shown_without_asking_all_again(visit: Begin, page_sidecar: PageSidecar) -> None:
    with FakeEngine(page_sidecar.endpoint, 40, BLOCK, "engine-one") as engine:
        page_sidecar.links(engine)
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
