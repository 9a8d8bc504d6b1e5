"""Which sessions shadows follow: a share of them, chosen by a hash of their names."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from ...graph.types import Keys, Rows

LEAST: Final = 1 / 64  # the smallest share of sessions; chosen
_SPAN: Final = 1 << 32


class SessionSample:
    """A share of sessions, and of the blocks that they walk.

    A session is in a smaller sample only if it is in all larger ones: when the share is halved,
    what was counted so far stays true of those that remain.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self.sessions: set[str] = set()
        self._walked: Keys = np.zeros(0, dtype=np.uint64)  # by row: the block that it was then

    def has(self, session: str) -> bool:
        """Whether a session is followed; ``session`` is its tenant's and its own name."""
        digest = hashlib.blake2b(session.encode(errors="surrogatepass"), digest_size=4).digest()
        if int.from_bytes(digest, "little") >= self.share * _SPAN:
            return False
        if len(self.sessions) < 1 << 16:
            self.sessions.add(digest.hex())
        return True

    def walked(self, rows: Rows, keys: Keys) -> None:
        """Note that sessions of the sample walked these blocks."""
        if len(rows) and int(rows.max()) >= len(self._walked):
            grown = np.zeros(int(rows.max()) * 5 // 4 + 1, dtype=np.uint64)
            grown[: len(self._walked)] = self._walked
            self._walked = grown
        self._walked[rows] = keys

    def part_of(self, rows: Rows, keys: Keys) -> float:
        """Which share of these blocks sessions of the sample walked.

        A prefix that many share is nearly whole in any sample of them; so this share, and not the
        share of sessions, says how large a pool is for the sample.
        """
        if self.share == 1.0 or not len(rows):
            return self.share
        known = rows < len(self._walked)
        return float(np.count_nonzero(self._walked[rows[known]] == keys[known]) / len(rows))

    def halve(self) -> bool:
        """Follow half as many from now on; False if there is nothing left to halve."""
        if self.share <= LEAST:
            return False
        self.share /= 2
        self.sessions.clear()
        return True
