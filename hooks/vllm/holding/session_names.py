"""Which sessions are live on this engine, by the names that callers give them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_MOST_SESSIONS: Final = 65_536  # remembered; the one silent longest is forgotten; chosen
_MOST_AT_ONCE: Final = 8  # requests of one session; a name with more is no session's. Chosen
_SHARE: Final = 1 / 256  # weight of the newest request in the running share of known names; chosen
_TRUSTED: Final = 0.25
"""If fewer requests than this share carry a name that was seen before, names are taken for request
ids and not trusted. A session of two requests gives .5. Chosen."""
_MOST_CONTEXTS: Final = 4  # remembered of one name: a session's own, and its subagents'. Chosen


class SessionName(NamedTuple):
    """A session as far as it has a name; a name is its tenant's."""

    tenant: str | None
    session: str


class Middle(NamedTuple):
    """The block halfway through a context, by its place and hash; what goes on from there has it.

    A name alone says nothing of a prompt: subagents bear their session's, and so may anyone.
    """

    at: int
    hash: bytes

    def is_in(self, hashes: Sequence[bytes]) -> bool:
        """Whether a prompt of these blocks goes on with at least half of the context."""
        return self.at < len(hashes) and hashes[self.at] == self.hash


def middle_of(hashes: Sequence[bytes]) -> Middle | None:
    """The middle of a context of these blocks; None if it has none."""
    half = len(hashes) // 2
    return Middle(half, hashes[half]) if hashes else None


@dataclass(slots=True)
class _Known:
    running: int = 0
    prompt: Middle | None = None  # of the last one that was scheduled
    contexts: tuple[Middle, ...] = ()  # that ended and go on in no other; the newest first


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

    def is_running(self, name: SessionName, hashes: Sequence[bytes]) -> bool:
        """Whether requests of ``name`` run, and a prompt goes on with the newest one's."""
        known = self._known.get(name)
        if known is None or not known.running or known.prompt is None:
            return False
        return known.prompt.is_in(hashes)

    def context(self, name: SessionName, hashes: Sequence[bytes]) -> Middle | None:
        """Middle of the context of ``name`` that a prompt goes on with; None if with none."""
        known = self._known.get(name)
        contexts = known.contexts if known is not None else ()
        return next((each for each in contexts if each.is_in(hashes)), None)

    def started(self, name: SessionName, prompt: Middle | None) -> None:
        """Note that a request of ``name`` was scheduled for the first time."""
        known = self._known.setdefault(name, _Known())
        known.running += 1
        known.prompt = prompt
        self._known.move_to_end(name)
        if len(self._known) > _MOST_SESSIONS:
            self._known.popitem(last=False)

    def finished(self, name: SessionName, hashes: Sequence[bytes], ended: bool) -> None:
        """Note that a scheduled request of ``name`` is over, and perhaps the session with it.

        Args:
            hashes: The full blocks of its context.
        """
        known = self._known.get(name)
        if known is None:
            return
        known.running = max(0, known.running - 1)
        middle = middle_of(hashes)
        if middle is not None:
            others = (each for each in known.contexts if not each.is_in(hashes))
            known.contexts = (middle, *others)[:_MOST_CONTEXTS]
        if ended and not known.running:
            del self._known[name]
