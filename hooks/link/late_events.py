"""Events that are made on the thread that sends, of what a step put by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...graph.messages.events import AnyEvent, Event, RequestFinished, RequestStarted
from ..keys import pack_hashes
from .outbox import Later


class LateHashes:
    """A request's start or end whose hashes are packed when it is sent.

    Args:
        event: The rest of it.
        hashes: Of its full blocks; not changed any more.
    """

    __slots__ = ("_event", "_hashes")

    def __init__(self, event: AnyEvent | Later, hashes: Sequence[bytes]) -> None:
        self._event = event
        self._hashes = hashes

    def events(self) -> Sequence[AnyEvent]:
        """The whole event."""
        made = [self._event] if isinstance(self._event, Event) else self._event.events()
        packed = pack_hashes(self._hashes)
        return [
            msgspec.structs.replace(event, hashes=packed)
            if isinstance(event, RequestStarted | RequestFinished)
            else event
            for event in made
        ]
