"""Events in runs: those that may be applied together, and no more than one slice takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from ..messages.events import (
    AnyEvent,
    BlocksLoaded,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    RequestFinished,
    RequestStarted,
)

SLICE_KEYS: Final = 8_192
"""Block keys that are applied in one hold of the graph's lock: some milliseconds; chosen. More only
where one request has a longer chain."""

CHURN: Final = (BlocksStored, BlocksRemoved)
TURNS: Final = (RequestStarted, RequestFinished)
SINGLE: Final[tuple[type, ...]] = ()

_RUNS: Final[dict[type, tuple[type, ...]]] = {
    **dict.fromkeys(CHURN, CHURN), **dict.fromkeys(TURNS, TURNS)
}  # fmt: skip
_CUT: Final = (BlocksStored, BlocksRemoved, BlocksSpilled, BlocksLoaded, CopiesDropped)
_BYTES: Final = 8 * SLICE_KEYS


class Run(NamedTuple):
    """Consecutive events, or parts of them.

    Attributes:
        kind: ``CHURN`` or ``TURNS``, whose events are applied together; ``SINGLE`` has one event.
        keys: How many block keys they carry.
    """

    kind: tuple[type, ...]
    events: list[AnyEvent]
    keys: int


def event_runs(events: Sequence[AnyEvent]) -> Iterator[Run]:
    """All events, in their order, as runs."""
    kind, run, size = SINGLE, list[AnyEvent](), 0
    for event in events:
        own, own_size = _RUNS.get(type(event), SINGLE), len(getattr(event, "hashes", b""))
        if run and (own is not kind or own is SINGLE or size + own_size > _BYTES):
            yield Run(kind, run, size // 8)
            run, size = [], 0
        kind = own
        if own_size > _BYTES:
            *whole, event = _parts(event)
            yield from (Run(kind, [part], SLICE_KEYS) for part in whole)
            own_size = len(getattr(event, "hashes", b""))
        run.append(event)
        size += own_size
    if run:
        yield Run(kind, run, size // 8)


def _parts(event: AnyEvent) -> list[AnyEvent]:
    """An event with many keys, as several that mean the same; or itself, if it cannot be cut.

    An event whose keys are not whole is refused whole, later.
    """
    if not isinstance(event, _CUT) or len(event.hashes) % 8:
        return [event]
    hashes, parts = event.hashes, list[AnyEvent]()
    for start in range(0, len(hashes), _BYTES):
        part = replace(event, hashes=hashes[start : start + _BYTES])
        if start and isinstance(part, BlocksStored):
            part = replace(part, parent=int.from_bytes(hashes[start - 8 : start], "little"))
        parts.append(part)
    return parts
