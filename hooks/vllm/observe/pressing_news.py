"""When the sidecar must hear of the engine's news at once."""

from __future__ import annotations

from typing import Final

from ....graph.messages.advice import PRESSING_SHARE

_LEAST: Final = 1  # block; of a pool so small that the share is less than one


class PressingNews:
    """Says when news cannot wait for the client's next tick, 0.2 s later.

    News is pressing after a step if a good part of the pool was stored since the last time: what
    goes next should be chosen in sight of it. It is, too, when the last running request ends after
    as much: the next one may come at once, and it should find advice that knows how this one ended.

    Args:
        pool_blocks: Blocks of the pool.
    """

    def __init__(self, pool_blocks: int) -> None:
        self._much = max(_LEAST, int(PRESSING_SHARE * pool_blocks))
        self._at_step = self._at_rest = 0  # blocks stored until the last time

    def after_step(self, stored: int) -> bool:
        """Whether the news is pressing; ``stored``: blocks, since the start."""
        if stored - self._at_step < self._much:
            return False
        self._at_step = stored
        return True

    def at_rest(self, stored: int) -> bool:
        """The same when no request runs any more."""
        if stored - self._at_rest < self._much:
            return False
        self._at_rest = stored
        return True
