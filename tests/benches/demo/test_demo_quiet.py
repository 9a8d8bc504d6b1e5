"""A bench's standard output is its figures'."""

from __future__ import annotations

import logging

import pytest
from kvgraph.bench.paper.quiet import only_errors


def test_nothing_below_an_error_is_logged_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = logging.getLogger("vllm.model"), logging.getLogger("kvgraph.hooks.log")
    with caplog.at_level("INFO", "vllm"), caplog.at_level("INFO", "kvgraph"):
        with only_errors():
            theirs.setLevel(logging.INFO)  # as vLLM does whenever it likes
            theirs.warning("in the middle of the figures")
            ours.info("so is this")
            theirs.error("this must be read")
        theirs.info("afterwards")
    assert [record.getMessage() for record in caplog.records] == ["this must be read", "afterwards"]
