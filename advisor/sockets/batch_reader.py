"""``BatchReader``: decodes frames into events; counts and logs what is refused, by reason."""

from __future__ import annotations

from collections import Counter

from ...graph.errors import VersionError, WireError
from ...graph.messages import wire
from ...graph.messages.wire import EventMessage
from ..process.notices import Notices


class BatchReader:
    """Decodes batches of any engine.

    Args:
        counters: Counts messages, events, and what was refused by reason.
    """

    def __init__(self, counters: Counter[str], notices: Notices) -> None:
        self._counters = counters
        self._notices = notices

    def read(self, frames: list[bytes]) -> EventMessage | None:
        """Decode a batch; None if the frames are not one."""
        self._counters["messages"] += 1
        try:
            message = wire.decode_events(frames)
        except VersionError as error:
            self._counters["refused_version"] += 1
            self._notices.once("version", "a message was refused: %s", error)
            return None
        except WireError as error:
            self._counters["refused_wire"] += 1
            self._notices.warn("wire", "a message was refused: %s", error)
            return None
        self._count(message)
        return message

    def _count(self, message: EventMessage) -> None:
        self._counters["events"] += len(message.events)
        if message.unknown:
            self._counters["unknown_events"] += message.unknown
            self._notices.once(
                "unknown", "an engine sends events of a kind that this build does not know: skipped"
            )
        if message.refused:
            self._counters["refused_wire"] += 1
            self._notices.warn("event", "an event was refused: %s", message.refused)
