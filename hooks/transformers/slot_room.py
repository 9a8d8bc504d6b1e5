"""How many slots a layer makes room for: memory follows what it holds."""

from __future__ import annotations

from typing import Final

_LEAST: Final = 16  # slots at least that are free after a move; chosen
_SHARE: Final = 4  # a quarter of what is held is free after a move; chosen


def room_for(held: int, usual: int) -> int:
    """Slots for ``held`` tokens and the next ones, so that few steps move them.

    Args:
        usual: Beyond it, no slot is free: a layer holds more only where a prompt brings more.
    """
    return max(held, min(usual, held + max(_LEAST, held // _SHARE)))
