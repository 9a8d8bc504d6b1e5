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


def warn_read_no_more(logger: logging.Logger, what: str, error: Exception) -> None:
    """Say that something is read no more, without the error's words: they may quote a text."""
    logger.warning(
        "kvgraph: %s is read no more (%s); callers may say it",
        what,
        type(error).__name__,
        exc_info=logger.isEnabledFor(logging.DEBUG),
    )
