"""What clients had waited that gave up: who asks again goes on from there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

_MOST: Final = 4096  # remembered; who gave up longest ago is forgotten. Chosen
_MOST_LOOKED_UP: Final = 64  # blocks of a prompt, from its end: what it goes on with; chosen


class _Wait(NamedTuple):
    gone_at: float
    waited_s: float


class GaveUp:
    """Waits that ended with nothing, by session, or by the end of the prompt where it has no name.

    The time between giving up and asking again is not credited: absence is no patience. A wait
    counts once.

    Args:
        kept_s: For how long a wait is remembered, in seconds.
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._waits: OrderedDict[Hashable, _Wait] = OrderedDict()  # who went last is last

    def __len__(self) -> int:
        return len(self._waits)

    def note(self, asker: Hashable, waited_s: float, now: float) -> None:
        """Note that ``asker`` gave up after so long, other waits of its own counted."""
        self._waits.pop(asker, None)
        self._waits[asker] = _Wait(now, waited_s)
        if len(self._waits) > _MOST:
            self._waits.popitem(last=False)

    def take(self, name: Hashable | None, hashes: Sequence[bytes], now: float) -> float:
        """Seconds that who asks now had waited before; 0 if it did not, or long ago.

        Args:
            name: Its session's; None: it has none, and is known by its prompt.
            hashes: Of the prompt's blocks: it may go on with the prompt that was given up.
        """
        waits = self._waits
        while waits and next(iter(waits.values())).gone_at < now - self._kept_s:
            waits.popitem(last=False)
        if not waits:
            return 0.0
        askers = hashes[: -_MOST_LOOKED_UP - 1 : -1] if name is None else (name,)
        found = (waits.pop(asker) for asker in askers if asker in waits)
        wait = next(found, None)
        return wait.waited_s if wait is not None else 0.0
