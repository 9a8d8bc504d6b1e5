"""Which sessions shadows follow: a share of them, chosen by a hash of their names."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.columns.columns import grown
from ...graph.types import Keys, Rows

LEAST: Final = 1 / 64  # the smallest share of sessions; chosen
_SPAN: Final = 1 << 32
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing
_UPPER: Final = np.uint64(32)


class SessionSample:
    """A share of sessions, and of the blocks that they walk.

    A session is in a smaller sample only if it is in all larger ones: when the share is halved,
    what was counted so far stays true of those that remain. Each has a place below ``2 ** 32``, and
    is followed if that is below the share of it.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self.sessions: set[str] = set()
        self._walked: Keys = np.zeros(0, dtype=np.uint64)  # by row: the block that it was then
        # By row: the least place of a session that walked it.
        self._least: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)

    def has(self, session: str) -> bool:
        """Whether a session is followed; ``session`` is its tenant's and its own name."""
        place = _place(session)
        if place >= self.share * _SPAN:
            return False
        if len(self.sessions) < 1 << 16:
            self.sessions.add(f"{place:08x}")
        return True

    def walked(self, session: str, rows: Rows, keys: Keys) -> None:
        """Note that a session of the sample walked these blocks."""
        self._note(rows, keys, np.full(len(rows), _place(session), dtype=np.uint32))

    def seeded(self, rows: Rows, keys: Keys) -> None:
        """Note blocks of sessions that are not known, as if each were one session's own."""
        self._note(rows, keys, ((keys * _MULTIPLIER) >> _UPPER).astype(np.uint32))

    def part_of(self, rows: Rows, keys: Keys) -> float:
        """Which share of these blocks sessions of the sample walked.

        A prefix that many share is nearly whole in any sample of them; so this share, and not the
        share of sessions, says how large a pool is for the sample.
        """
        if self.share == 1.0 or not len(rows):
            return self.share
        known = rows < len(self._walked)
        rows, keys = rows[known], keys[known]
        ours = (self._walked[rows] == keys) & (self._least[rows] < self.share * _SPAN)
        return float(np.count_nonzero(ours) / len(known))

    def halve(self) -> bool:
        """Follow half as many from now on; False if there is nothing left to halve."""
        if self.share <= LEAST:
            return False
        self.share /= 2
        self.sessions.clear()
        return True

    def _note(self, rows: Rows, keys: Keys, places: npt.NDArray[np.uint32]) -> None:
        if len(rows) and int(rows.max()) >= len(self._walked):
            size = int(rows.max()) * 5 // 4 + 1
            self._walked, self._least = grown(self._walked, size), grown(self._least, size)
        least, known = self._least[rows], self._walked[rows] == keys
        if known.all() and (least <= places).all():
            return  # as of every end of a request, but for its answer
        self._least[rows] = np.where(known, np.minimum(least, places), places)
        self._walked[rows] = keys


@lru_cache(maxsize=1 << 12)
def _place(session: str) -> int:
    digest = hashlib.blake2b(session.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little")
