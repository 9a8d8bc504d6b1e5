"""Our log lines, beside vLLM's."""

from __future__ import annotations

import logging


def log_where_vllm_logs() -> None:
    """Give our loggers vLLM's handlers, unless somebody configured ours."""
    ours, theirs = logging.getLogger("kvgraph"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    ours.handlers = list(theirs.handlers)
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level or logging.INFO)
