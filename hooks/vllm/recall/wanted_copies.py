"""``WantedCopies``: blocks that opted-in requests leave, each of which is worth a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from ...keys import key_of
from ...tiers.ledger import TierLedger

_COPIED_PER_STEP: Final = 256  # blocks; chosen
_MOST_DUE: Final = 65_536  # blocks whose copies were not begun yet; chosen


class WantedCopies:
    """Lets blocks be copied as soon as they are computed, and whenever they are about to go.

    Args:
        ledger: Where copies are recorded.

    Attributes:
        wanted: Keys of the blocks, the oldest first.
    """

    def __init__(self, ledger: TierLedger) -> None:
        self._ledger = ledger
        self._due: deque[bytes] = deque(maxlen=_MOST_DUE)
        self.wanted: dict[int, None] = {}

    @property
    def due(self) -> bool:
        """Whether blocks are to be copied in another step."""
        return bool(self._due)

    def add(self, hashes: Sequence[bytes]) -> None:
        """Want copies of these blocks."""
        self.wanted.update(dict.fromkeys(map(key_of, hashes)))
        excess = len(self.wanted) - _MOST_DUE
        for key in list(islice(self.wanted, max(0, excess))):
            del self.wanted[key]
        self._due.extend(each for each in hashes if each not in self._ledger.directory)

    def keep_here(self, hashes: Sequence[bytes]) -> None:
        """Let no copy of these blocks outlive this process."""
        self._ledger.kept_off_disk.update(map(key_of, hashes))

    def take(self) -> list[bytes]:
        """Take hashes of blocks that are to be copied now."""
        count = min(_COPIED_PER_STEP, len(self._due))
        return list(dict.fromkeys(self._due.popleft() for _ in range(count)))

    def clear(self) -> None:
        """Want nothing."""
        self._due.clear()
        self.wanted.clear()
