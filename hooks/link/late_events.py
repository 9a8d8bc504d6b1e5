"""Events that are made on the thread that sends, of what a step put by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...graph.messages.events import (
    AnyEvent,
    BlocksStored,
    Event,
    RequestFinished,
    RequestStarted,
)
from ..keys import key_of, pack_hashes
from .outbox import Later

Run = tuple[bytes, bytes | None, str | None]
"""Packed keys of consecutive blocks, the hash of the block before them, and their session."""


class LateRuns:
    """What entered the prefix cache in a step; see ``hooks.link.outbox.Later``.

    Args:
        runs: In order; not changed any more.
        block_size: Tokens.
    """

    __slots__ = ("_block_size", "_runs")

    def __init__(self, runs: Sequence[Run], block_size: int) -> None:
        self._runs = runs
        self._block_size = block_size

    def events(self) -> Sequence[AnyEvent]:
        """One event for each run."""
        return [
            BlocksStored(
                packed, None if parent is None else key_of(parent), self._block_size, session
            )
            for packed, parent, session in self._runs
        ]


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
