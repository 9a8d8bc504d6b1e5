"""Whatever callers call their sessions, tenants, segments and memories: it is text."""

from __future__ import annotations

from collections.abc import Callable

from kvgraph.graph.wire.events import BlocksRemoved, BlocksStored, RequestFinished, RequestStarted
from kvgraph.hooks.fake import FakeEngine
from page_browser import Visit
from page_sidecar import BLOCK, PageSidecar, serve_agents
from small_world import pack

HOSTILE = [
    "<script>window.pwned=1</script>",
    "<img src=x onerror='window.pwned=2'>",
    "<svg onload=window.pwned=3>",
    '"><script>window.pwned=4</script>',
    "'><img src=x onerror=window.pwned=5>",
    "javascript:window.pwned=6",
    "<a href='javascript:window.pwned=7'>click</a>",
    "<iframe srcdoc='<script>parent.pwned=8</script>'></iframe>",
    "<style>*{display:none}</style>",
    "<link rel=stylesheet href=//evil.invalid/x.css>",
    "</title><script>window.pwned=9</script>",
    "</textarea><script>window.pwned=10</script>",
    "<!--<script>window.pwned=11</script>-->",
    "{{constructor.constructor('window.pwned=12')()}}",
    "${window.pwned=13}",
    "`-window.pwned=14-`",
    "<math><mtext><script>window.pwned=15</script>",
    "<object data='javascript:window.pwned=16'>",
    "<body onload=window.pwned=17>",
    "<details open ontoggle=window.pwned=18>",
    "<base href=//evil.invalid/>",
    "<form action=//evil.invalid><input autofocus onfocus=window.pwned=19>",
    "<meta http-equiv=refresh content='0;url=//evil.invalid'>",
    "__proto__",
    "constructor",
    "../../status?x=<script>#%2F%00",
    "a\u202eb\u2066c\u0000d\x1b[31me",
    "\ud83d\ude00" * 8,
    "&lt;script&gt;window.pwned=20&lt;/script&gt;",
    "x" * 256,
]
VIEWS = ("now", "graph", "graph?as=table", "graph?layout=timeline", "misses", "evictions",
         "evictions?tab=log", "whatif", "weights", "sessions", "engines", "sampled",
         "caches")  # fmt: skip

Begin = Callable[..., Visit]


def tell_the_rest(engine: FakeEngine, names: list[str]) -> None:
    """Fields that no agent of ``serve_agents`` fills: requests' ids, why they ended, tools; and
    misses that name others.
    """
    for number, name in enumerate(names):
        key, head = pack(10_000 + number), pack(9_999)
        found, whose = (BLOCK, f"{name} again") if number else (0, name)
        engine.client.emit(RequestStarted(name, head + key, 2 * BLOCK + 5, found, BLOCK, whose))
        fresh, parent = (key, 9_999) if number else (head + key, None)
        engine.client.emit(BlocksStored(fresh, parent, BLOCK))
        end = RequestFinished(
            name, head + key, 2 * BLOCK + 5, 2 * BLOCK + 5, name, whose,
            waiting_for_tool=True, expected_return_s=5.0, tool=name,
        )  # fmt: skip
        engine.client.emit(end)
        engine.client.emit(BlocksRemoved(key))


def test_hostile_names_execute_nothing(visit: Begin, page_sidecar: PageSidecar) -> None:
    assert len(HOSTILE) == 30
    names = [name.encode("utf-16", "surrogatepass").decode("utf-16") for name in HOSTILE]
    with FakeEngine(page_sidecar.endpoint, 120, BLOCK, "<img src=x onerror=pwned=1>") as engine:
        page_sidecar.links(engine)
        serve_agents(engine, names, turns=2)
        tell_the_rest(engine, names)
        for name in names:
            page_sidecar.show_cache(name)
        page_sidecar.hears_of(3 * len(names) - 1)  # the longest names no request: it is refused
        opened = visit()
        page = opened.page
        page.goto(page_sidecar.address)
        page.get_by_text("live", exact=True).wait_for()
        for view in VIEWS:
            opened.show(view)
            page.wait_for_timeout(300)
        opened.show("sessions")
        page.get_by_text("waits for <script>window.pwned=1</script>").first.wait_for()
        page.get_by_text("<script>window.pwned=1</script>", exact=True).first.click()
        page.get_by_role("heading", name="<script>window.pwned=1</script>").wait_for()
        for row in page.locator(".rows .link").all()[:30]:
            row.click()
            page.wait_for_timeout(60)
        opened.show("misses")
        page.get_by_text("diverged", exact=True).first.wait_for()
        for row in page.locator(".requests button").all()[:30]:
            row.click()
        opened.show("misses?find=svg%20onload")
        page.locator(".requests button", has_text="diverged").first.click()
        page.locator(".opened .mono").get_by_text(HOSTILE[2], exact=True).wait_for()
        page.locator(".opened .reason").get_by_text("up to there the prompt is that").wait_for()
    assert page.evaluate("window.pwned") is None
    elements = ", ".join(f"#page {each}" for each in ("script", "iframe", "object", "img", "base"))
    assert page.locator(elements).count() == 0
    assert page.locator("a[href^='javascript:' i]").count() == 0
    assert opened.faults == []
