"""When the sidecar must hear of the engine's news at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ....graph.messages.advice import PRESSING_SHARE

_LEAST: Final = 1  # block; of a pool so small that the share is less than one


class PressingNews:
    """Has news told at once that cannot wait for the client's next tick, 0.2 s later.

    News is pressing after a step if a good part of the pool was stored since the last time: what
    goes next should be chosen in sight of it. It is, too, when the last running request ends after
    as much: the next one may come at once, and it should find advice that knows how this one ended.

    Args:
        pool_blocks: Blocks of the pool.
        tell: Has what is queued sent now.
    """

    def __init__(self, pool_blocks: int, tell: Callable[[], None]) -> None:
        self._much = max(_LEAST, int(PRESSING_SHARE * pool_blocks))
        self._tell = tell
        self._at_step = self._at_rest = 0  # blocks stored until the last time

    def after_step(self, stored: int) -> None:
        """Have it told if the news is pressing; ``stored``: blocks, since the start."""
        if stored - self._at_step >= self._much:
            self._at_step = stored
            self._tell()

    def at_rest(self, stored: int) -> None:
        """The same when no request runs any more."""
        if stored - self._at_rest >= self._much:
            self._at_rest = stored
            self._tell()
