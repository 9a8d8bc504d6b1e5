"""``Voided``: what the scheduler has given up and the workers were not told of yet."""

from __future__ import annotations

from typing import NamedTuple


class Void(NamedTuple):
    """What workers are told, as ``TierWork`` has it."""

    release: tuple[int, ...]
    erase: tuple[bytes, ...]
    disown: bool


class Voided:
    """Collects what is given up.

    Attributes:
        released: Copies whose memory is free.
        erased: Hashes of records on disk.
        cleared: Whether everything was given up.
    """

    def __init__(self) -> None:
        self.released: list[int] = []
        self.erased: list[bytes] = []
        self.cleared = False

    def take(self) -> Void:
        """Take what was given up since the last call."""
        void = Void(tuple(self.released), tuple(self.erased), self.cleared)
        self.released, self.erased, self.cleared = [], [], False
        return void
