"""Which sidecars a router asks: those of its own machine, and those that an operator names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ....graph.errors import ConfigError
from ....graph.ipc.runtime import RunningSidecar, running_sidecars
from ...remote import TOKEN_VARIABLE, secret_of
from .engine_list import MOST_SHOWN, is_address

_log = logging.getLogger(__name__)


def sidecars_with(others: Sequence[str]) -> Callable[[], list[RunningSidecar]]:
    """Finds this user's sidecars on this machine, and those of other machines at ``others``.

    Args:
        others: URLs; their token is the environment's.

    Raises:
        ConfigError: One is no URL, or that is no token.
    """
    urls = [url.rstrip("/") for url in others]
    if wrong := [url for url in urls if not is_address(url)]:
        raise ConfigError(f"--sidecar {wrong[0][:MOST_SHOWN]!r}: allowed: http://HOST:PORT")
    named = [RunningSidecar(0, "", url, secret_of(url)) for url in dict.fromkeys(urls)]

    if not all(each.token.isascii() for each in named):
        raise ConfigError(f"{TOKEN_VARIABLE}: allowed: letters, digits and ._~+/=-")
    try:
        running_sidecars()
    except ConfigError as error:
        _log.warning("sidecars of this machine are not asked: %s", error)
    return lambda: [*named, *(each for each in _here() if each.http not in urls)]


def _here() -> list[RunningSidecar]:
    try:
        return running_sidecars()
    except ConfigError:
        return []
