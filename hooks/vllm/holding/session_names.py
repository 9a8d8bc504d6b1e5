"""Which sessions are live on this engine, by the names that callers give them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

_MOST_SESSIONS: Final = 65_536  # remembered; the one silent longest is forgotten; chosen
_MOST_AT_ONCE: Final = 8  # requests of one session; a name with more is no session's. Chosen
_SHARE: Final = 1 / 256  # weight of the newest request in the running share of known names; chosen
_TRUSTED: Final = 0.25
"""If fewer requests than this share carry a name that was seen before, names are taken for request
ids and not trusted. A session of two requests gives .5. Chosen."""


class SessionName(NamedTuple):
    """A session as far as it has a name; a name is its tenant's."""

    tenant: str | None
    session: str


@dataclass(slots=True)
class _Known:
    running: int = 0
    middle: bytes | None = None  # hash of the block halfway through its last context


class SessionNames:
    """What is remembered of named sessions between their requests."""

    def __init__(self) -> None:
        self._known: OrderedDict[SessionName, _Known] = OrderedDict()
        self._returning_share = 1.0  # share of names that were here before

    def arrived(self, name: SessionName) -> None:
        """Note that a request of ``name`` arrived."""
        known = name in self._known
        self._returning_share += _SHARE * (known - self._returning_share)
        if known:
            self._known.move_to_end(name)

    def is_new(self, name: SessionName) -> bool:
        """Whether ``name`` was never scheduled here, where names tell that."""
        return name not in self._known and self._returning_share >= _TRUSTED

    def is_known(self, name: SessionName) -> bool:
        """Whether a request of ``name`` was scheduled here before, and did not end it."""
        return name in self._known

    def is_one_session(self, name: SessionName, waiting: int) -> bool:
        """Whether ``name`` has few enough requests for one session, with those that wait."""
        known = self._known.get(name)
        return known is not None and known.running + waiting <= _MOST_AT_ONCE

    def is_running(self, name: SessionName) -> bool:
        """Whether requests of ``name`` run."""
        known = self._known.get(name)
        return known is not None and known.running > 0

    def middle(self, name: SessionName) -> bytes | None:
        """Hash of the block halfway through the last context of ``name``."""
        known = self._known.get(name)
        return known.middle if known is not None else None

    def started(self, name: SessionName) -> None:
        """Note that a request of ``name`` was scheduled for the first time."""
        self._known.setdefault(name, _Known()).running += 1
        self._known.move_to_end(name)
        if len(self._known) > _MOST_SESSIONS:
            self._known.popitem(last=False)

    def finished(self, name: SessionName, middle: bytes | None, ended: bool) -> None:
        """Note that a scheduled request of ``name`` is over, and perhaps the session with it."""
        known = self._known.get(name)
        if known is None:
            return
        known.running = max(0, known.running - 1)
        known.middle = middle or known.middle
        if ended and not known.running:
            del self._known[name]
