"""A headless Chromium for tests of the page, and what is wrong with what it shows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from waiting import PATIENCE_S

REQUIRED: Final = "KVGRAPH_BROWSER_REQUIRED"
"""Set where a missing browser is a failure: CI installs one."""

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_SOFTWARE_GL: Final = (
    "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--ignore-gpu-blocklist",
)  # fmt: skip

# Answers that the page shows in words, and what software GL says of reading pixels.
_NO_FAULTS: Final = ("status of 404", "status of 503", "GPU stall")


def _without(what: str) -> None:
    """Skip, saying what is missing; fail where it must be there."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{what}, and {REQUIRED} is set")
    pytest.skip(what)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser; the test is skipped where there is none. Of one module: while its driver lives,
    an event loop runs in this thread, and the tests of other modules want their own.
    """
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        _without("no Chromium: `apt-get install chromium`, or have one on the PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _without("no playwright: pip install 'kvgraph[dev]'")
    with sync_playwright() as driver:
        # CI runs as root, where Chromium's own sandbox cannot be had; the page is ours.
        arguments = ["--no-sandbox", *_SOFTWARE_GL]
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


class Visit:
    """One page in a context of its own, and what went wrong on it."""

    def __init__(self, browser: Any, **context: Any) -> None:
        self._context = browser.new_context(
            viewport={"width": 1280, "height": 800}, reduced_motion="reduce", **context
        )
        self._context.set_default_timeout(1000 * PATIENCE_S)
        self.page = self._context.new_page()
        # what the browser's console said, and errors that nobody caught
        self.faults: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", self._dismiss)

    def show(self, view: str) -> Any:
        """Go to a view by the address after ``#``."""
        self.page.evaluate("there => { window.location.hash = there }", f"#/{view}")
        self.until("document.querySelector('main [aria-busy=true]') === null")
        return self.page

    def until(self, condition: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait for a JavaScript expression; playwright's own way would need ``unsafe-eval``."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"it does not become true: {condition}"
            self.page.wait_for_timeout(50)

    def still_picture(self, place: Any) -> bytes:
        """What is painted there, once that has settled: two pictures in a row are alike."""
        deadline, before = time.monotonic() + PATIENCE_S, b""
        while (picture := place.screenshot()) != before:
            assert time.monotonic() < deadline, "the picture does not stand still"
            before = picture
            self.page.wait_for_timeout(800)
        return bytes(before)

    def repaints(self, place: Any, before: bytes) -> None:
        """Wait until another picture is painted there."""
        deadline = time.monotonic() + PATIENCE_S
        while place.screenshot() == before:
            assert time.monotonic() < deadline, "the picture stays"
            self.page.wait_for_timeout(50)

    def close(self) -> None:
        self._context.close()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(
            each in message.text for each in _NO_FAULTS
        ):
            self.faults.append(f"{message.type}: {message.text}")

    def _dismiss(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()


def serious_faults(page: Any) -> dict[str, list[str]]:
    """What keeps people from using a page, by axe's rule, with some of the elements."""
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        _without("no axe: pip install 'kvgraph[dev]'")
    return {
        each["id"]: [node["html"][:160] for node in each["nodes"][:3]]
        for each in Axe().run(page).response["violations"]
        if each["impact"] in ("serious", "critical")
    }


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    """Makes ``Visit``s; they are closed after the test."""
    visits: list[Visit] = []

    def begin(**context: Any) -> Visit:
        visits.append(Visit(chromium, **context))
        return visits[-1]

    yield begin
    for each in visits:
        each.close()
