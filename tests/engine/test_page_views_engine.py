"""A real vLLM, its sidecar, and a browser: every view shows what the engine did."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_browser import Visit
from page_sidecar import TOKEN, PageSidecar

pytestmark = pytest.mark.engine
VIEWS = ("now", "graph", "misses", "evictions?tab=log", "whatif", "weights", "sessions", "engines")


def ask(sidecar: PageSidecar, path: str) -> Any:
    request = urllib.request.Request(sidecar.url + path)
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_the_page_shows_what_a_real_engine_did(
    page_sidecar: PageSidecar, visit: Callable[..., Visit], new_engine: Any, tiny_model: Path
) -> None:
    opened = visit()
    opened.page.goto(page_sidecar.address)
    opened.page.get_by_text("No request yet").wait_for()
    new_engine(
        "engine_run.py", {"model": str(tiny_model), "pause_s": 0.05},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=page_sidecar.endpoint,
    ).run()  # fmt: skip
    for view in VIEWS:
        opened.show(view)
    requests = ask(page_sidecar, "/v1/requests?limit=100")["requests"]
    page = opened.show("misses")
    assert page.locator(".requests > li").count() == len(requests) > 0
    missed = next(each for each in requests if each["miss"] and each["blocks"]["computed"])
    page = opened.show(f"misses?request={missed['id']}")
    page.locator(".sentence", has_text=missed["miss"]["sentence"]).wait_for()
    page = opened.show("graph")
    page.locator(".status", has_text="blocks").wait_for()
    assert opened.faults == []
