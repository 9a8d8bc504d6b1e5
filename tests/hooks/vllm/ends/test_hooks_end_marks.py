"""Marks on their way from the process that learns them to the one that reads answers."""

from __future__ import annotations

import logging

import pytest
from kvgraph.hooks.requests.ends import EndMarks, configured_marks, read_marks
from kvgraph.hooks.settings import ENDS_KEY, ENDS_VARIABLE

MARKS = EndMarks(
    turn_ends=(2,), opener=7, before='{"name": "', after='"', closers=("]",), model="m"
)


def test_marks_arrive_as_they_were() -> None:
    assert read_marks(MARKS.text()) == MARKS
    assert configured_marks({ENDS_KEY: MARKS.text()}, {}) == MARKS
    assert configured_marks({}, {ENDS_VARIABLE: MARKS.text()}) == MARKS
    assert configured_marks({}, {}) is None


def test_marks_of_another_model_are_none() -> None:
    """An engine's environment may be that of a program with another engine."""
    assert MARKS.are_of("m")
    assert not MARKS.are_of("other")
    assert read_marks('{"turn_ends": [2]}').are_of("other")


@pytest.mark.parametrize(
    "text",
    ["nonsense", "[]", '{"turn_ends": [-1]}', '{"turn_ends": ["x"]}', '{"turn_ends": [], "no": 1}',
     '{"turn_ends": [1], "before": "' + "x" * 300 + '"}', "{" * 100_000],
)  # fmt: skip
def test_what_is_malformed_leaves_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert configured_marks({}, {ENDS_VARIABLE: text}) is None
    assert [ENDS_VARIABLE in record.getMessage() for record in caplog.records] == [True]


def test_zero_is_no_mark(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert configured_marks({}, {ENDS_VARIABLE: "0"}) is None
    assert not caplog.records
