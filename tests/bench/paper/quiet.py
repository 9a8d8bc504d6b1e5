"""``only_errors``: vLLM logs to standard output, where a bench writes its figures."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_errors() -> Iterator[None]:
    """Log nothing below an error: vLLM sets the levels of its loggers anew whenever it likes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
