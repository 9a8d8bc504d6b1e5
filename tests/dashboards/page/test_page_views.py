"""A real browser opens every view against a live sidecar."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvgraph.graph.wire.events import AdmissionReport, RequestHeld, RequestReleased
from kvgraph.hooks.fake import FakeEngine
from page_browser import Visit, serious_faults
from page_sidecar import PageSidecar

ONE = "sessions?session=agent-01&tenant=agent-01"
VIEWS = ("now", "graph", "misses", "evictions", "evictions?tab=log", "whatif", "weights",
         "sessions", "engines", "sampled", "caches", "graph?as=table", ONE)  # fmt: skip
PHONE = {"width": 390, "height": 844}

Begin = Callable[..., Visit]


@pytest.fixture
def opened(visit: Begin, busy_sidecar: PageSidecar) -> Visit:
    """The page, opened by the address that the sidecar gives."""
    begun = visit()
    begun.page.goto(busy_sidecar.address)
    begun.page.get_by_text("live", exact=True).wait_for()
    return begun


def shows_no_trouble(opened: Visit) -> None:
    page = opened.page
    assert page.get_by_role("alert").filter(has_text="could not be shown").count() == 0
    assert page.get_by_text("This view failed").count() == 0
    assert opened.faults == []


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_and_has_no_serious_fault(opened: Visit, view: str) -> None:
    page = opened.show(view)
    page.wait_for_timeout(300)
    assert serious_faults(page) == {}
    shows_no_trouble(opened)


def test_light_is_as_readable_as_dark(visit: Begin, busy_sidecar: PageSidecar) -> None:
    begun = visit(color_scheme="light")
    begun.page.goto(busy_sidecar.address)
    begun.page.get_by_text("live", exact=True).wait_for()
    for view in VIEWS:
        assert serious_faults(begun.show(view)) == {}, view


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_shows_it_without_scrolling_sideways(opened: Visit, view: str) -> None:
    opened.page.set_viewport_size(PHONE)
    page = opened.show(view)
    page.wait_for_timeout(200)
    beyond = "() => document.documentElement.scrollWidth - window.innerWidth"
    assert page.evaluate(beyond) <= 0


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


def test_a_page_without_an_engine_says_what_to_do_next(
    visit: Begin, page_sidecar: PageSidecar
) -> None:
    begun = visit()
    begun.page.goto(page_sidecar.address)
    begun.page.get_by_text("live", exact=True).wait_for()
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
    begun = visit()
    with FakeEngine(page_sidecar.endpoint, 64, 16, "engine-one") as engine:
        begun.page.goto(page_sidecar.address)
        begun.page.get_by_text("live", exact=True).wait_for()
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


def test_a_session_is_shown_as_it_was(opened: Visit) -> None:
    page = opened.show(ONE)
    page.get_by_text("Shown as it is now").wait_for()
    page.get_by_role("slider", name="Go back in time").focus()
    page.keyboard.press("Home")
    page.get_by_role("button", name="Back to now").wait_for()
    opened.until("window.location.hash.includes('at=')")
    page.get_by_role("heading", name="What had happened by then").wait_for()
    page.get_by_role("button", name="Back to now").click()
    page.get_by_role("heading", name="What happened").wait_for()
    shows_no_trouble(opened)


def test_the_token_is_asked_for_in_words(visit: Begin, busy_sidecar: PageSidecar) -> None:
    stranger = visit()
    stranger.page.goto(busy_sidecar.url)
    stranger.page.get_by_text("kvgraph open").wait_for()


def test_an_address_leads_to_where_it_was_taken(opened: Visit) -> None:
    page = opened.show(ONE)
    page.get_by_role("heading", name="agent-01").wait_for()
    page.reload()
    page.get_by_role("heading", name="agent-01").wait_for()


def test_the_views_are_reached_by_keyboard(opened: Visit) -> None:
    page = opened.page
    page.get_by_role("link", name="Misses").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Misses", exact=True).wait_for()
    assert page.url.endswith("#/misses")


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
