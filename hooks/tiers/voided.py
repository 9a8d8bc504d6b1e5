"""``Voided``: what the scheduler has given up, or made sure of, and the workers were not told of
yet."""

from __future__ import annotations

from typing import NamedTuple


class Void(NamedTuple):
    """What workers are told, as ``TierWork`` has it."""

    release: tuple[int, ...]
    erase: tuple[bytes, ...]
    disown: bool
    named: tuple[tuple[int, bytes], ...]


class Voided:
    """Collects what is given up, and what is whole.

    Attributes:
        released: Copies whose memory is free.
        erased: Hashes of records on disk.
        cleared: Whether everything was given up.
        named: Whole copies that no disk has and that may be written there, with their hashes.
    """

    def __init__(self) -> None:
        self.released: list[int] = []
        self.erased: list[bytes] = []
        self.cleared = False
        self.named: list[tuple[int, bytes]] = []

    def take(self) -> Void:
        """Take what was collected since the last call."""
        void = Void(tuple(self.released), tuple(self.erased), self.cleared, tuple(self.named))
        self.released, self.erased, self.cleared, self.named = [], [], False, []
        return void
