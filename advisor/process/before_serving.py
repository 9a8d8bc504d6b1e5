"""What a command that listens for requests does before it serves."""

from __future__ import annotations

import logging
from typing import Final

from ...graph.errors import ConfigError
from ...graph.ipc.addresses import is_loopback

_CUT: Final = "ASGI callable returned without completing response"
"""What uvicorn logs when an answer ends early. We end one so when its engine is gone, and log that
engine ourselves."""


def refuse_remote(host: str, allow_remote: bool) -> None:
    """Refuse to listen beyond loopback unless ``allow_remote`` allows it.

    Raises:
        ConfigError: ``host`` is not loopback, and nothing else was allowed.
    """
    if not (is_loopback(host) or allow_remote):
        raise ConfigError(f"--host {host}: listens beyond loopback; --allow-remote permits it")


def log_for_people() -> None:
    """Log to standard error, without a line for each request of ours or answer that is cut."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_news)


def _is_news(line: logging.LogRecord) -> bool:
    return _CUT not in line.getMessage()
