"""Requests told by their tips: what an overloaded sidecar asks for (``SendTips``)."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from ...graph.messages.events import AnyEvent, RequestFinished, RequestStarted

_KEY: Final = 8  # bytes


def as_tip(event: AnyEvent) -> AnyEvent:
    """A request's start or end with one key of its chain; any other event as it is.

    At its start that is the last block that the prefix cache holds: those behind it are told as
    they are stored. At its end it is the last of all. A start that says what its blocks are (some
    may be protected) is told whole; what is inferred of them is left out.
    """
    if isinstance(event, RequestStarted):
        if any(segment.authority for segment in event.segments):
            return event
        return _cut(replace(event, segments=()), event.cached_tokens // event.block_size)
    if isinstance(event, RequestFinished):
        return _cut(event, len(event.hashes) // _KEY)
    return event


def _cut(event: RequestStarted | RequestFinished, blocks: int) -> AnyEvent:
    """Only the last of the first ``blocks`` of its chain."""
    first = max(0, blocks - 1)
    tip = event.hashes[_KEY * first : _KEY * blocks]
    whole: dict[str, Any] = {"hashes": tip, "skipped": event.skipped + first if tip else 0}
    if isinstance(event, RequestStarted):
        whole["contents"] = b""
    return replace(event, **whole)
