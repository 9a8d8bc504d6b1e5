"""How many slots a layer makes room for: memory follows what it holds."""

from __future__ import annotations

from typing import Final

_LEAST: Final = 16  # slots that are free after a move, if so many are allowed; chosen
_PARTS: Final = 4  # a quarter of what is held is free after a move, if it is more; chosen


def room_for(held: int, most: int) -> int:
    """Slots for ``held`` tokens and the next ones, so that few steps move them.

    Args:
        most: Slots, unless a prompt fills more; beyond it, none is free.
    """
    return max(held, min(most, held + max(_LEAST, held // _PARTS)))
