"""The two variables of admission, and the schedulers that they reach."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hall import shape
from kvgraph.graph.wire.advice import HOLD_MAX_S
from kvgraph.hooks.settings import (
    ADMISSION_VARIABLE,
    HOLD_MAX_VARIABLE,
    EngineSettings,
    engine_settings,
)
from kvgraph.hooks.vllm.holding.queue import HoldingQueue
from kvgraph.hooks.vllm.patches import bind_scheduler, follow_schedulers

pytestmark = pytest.mark.usefixtures("vllm_loaded")


BY_DEFAULT = EngineSettings.model_fields["admission"].default


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("auto", True), ("", BY_DEFAULT), ("0", False), ("off", False)]
)
def test_the_switch(monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv(ADMISSION_VARIABLE, text)
    assert engine_settings().admission is on
    monkeypatch.delenv(ADMISSION_VARIABLE)
    assert engine_settings().admission is BY_DEFAULT


def test_what_people_are_told_of_the_default_is_so() -> None:
    told = (Path(__file__).parents[4] / "docs/admission.md").read_text()
    assert f"`{ADMISSION_VARIABLE}={int(not BY_DEFAULT)}`" in told
    assert f"`{ADMISSION_VARIABLE}={int(BY_DEFAULT)}`" not in told


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 300.0), ("7.5", 7.5), ("0", 0.0), ("-1", 300.0), ("soon", 300.0)]
)
def test_the_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, seconds: float
) -> None:
    monkeypatch.setenv(HOLD_MAX_VARIABLE, text)
    with caplog.at_level(logging.WARNING):
        assert engine_settings("hold_max_s").hold_max_s == seconds
    assert EngineSettings().hold_max_s == HOLD_MAX_S
    assert len(caplog.records) == (text in ("-1", "soon"))
    assert all(HOLD_MAX_VARIABLE in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_schedulers_that_are_made_hold_where_it_is_switched_on(
    paper: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    monkeypatch.setenv(ADMISSION_VARIABLE, "0")
    follow_schedulers()
    assert Scheduler.__init__ is original, "off, nothing of vLLM's is touched"
    monkeypatch.delenv(ADMISSION_VARIABLE)
    follow_schedulers()
    follow_schedulers()
    engine = paper(shape(asynchronous=asynchronous))
    assert isinstance(engine.scheduler.waiting, HoldingQueue)
    assert len(engine.serve([1, 2, 3], 4)) == 4


def test_a_scheduler_that_lacks_a_part_goes_on_without(
    paper: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = paper(shape())
    del engine.scheduler.deferred_waiting
    with pytest.raises(TypeError, match="deferred_waiting"):
        bind_scheduler(engine.scheduler)
    assert engine.side is not None
    assert engine.side.holding is None


def test_a_scheduler_of_somebody_elses_making_keeps_its_queue(paper: Callable[..., Any]) -> None:
    """It may rely on its queue's being a deque."""
    engine = paper(shape())
    own = type(engine.scheduler)
    engine.scheduler.__class__ = type("Theirs", (own,), {"__module__": "theirs.schedulers"})
    with pytest.raises(TypeError, match="Theirs is not one of vLLM's own schedulers"):
        bind_scheduler(engine.scheduler)
    assert not isinstance(engine.scheduler.waiting, HoldingQueue)


def test_a_scheduler_of_nobody_ours_is_left_alone(paper: Callable[..., Any]) -> None:
    engine = paper(shape().__class__(stock=True))
    bind_scheduler(engine.scheduler)
    assert not isinstance(engine.scheduler.waiting, HoldingQueue)
