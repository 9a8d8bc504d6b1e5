"""Weights are changed on the page: seen first, applied, and taken back."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.tools.terminal import leading_to
from kvgraph.hooks.fake import FakeEngine
from page_browser import Visit
from page_sidecar import BLOCK, PageSidecar, serve_agents

Begin = Callable[..., Visit]


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
        time.sleep(0.5)
        serve_agents(engine, ["one", "two", "three"])
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
        time.sleep(2.0)
        assert first_score(opened) != before

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
