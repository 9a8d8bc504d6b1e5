"""``CopyMarks``: which blocks are worth a copy before they go."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import compress

import numpy as np

from ....graph.messages.advice import EvictionRanking
from ...keys import keys_in_pool
from ...link.held_ranking import NOBODY, Finds, worth_blocks_of, worth_of
from .found_blocks import FoundBlocks


class CopyMarks:
    """What advice says of copies, as marks by the numbers of blocks: most blocks have none.

    Args:
        pool_blocks: Blocks of the pool.
        finds: Finds the blocks that are worth a copy, where nobody did beforehand.

    Attributes:
        wanted: Keys of blocks that are worth a copy whatever the sidecar considers.
        worth: Keys of those that it does consider worth one; None: all are.
    """

    def __init__(self, pool_blocks: int, finds: Finds) -> None:
        self.wanted: Container[int] = ()
        self.worth: frozenset[int] | None = None
        self._finds = finds
        self._spill_first: object = None  # the array that ``worth`` was made of
        self._marked = self._none = np.zeros(pool_blocks, dtype=bool)
        self._elsewhere: Container[int] = ()  # keys of ``worth`` that no block held then
        self._passed = self._none.copy()  # blocks that were looked at, and were not worth it

    def follow(self, ranking: EvictionRanking | None) -> bool:
        """Follow advice; returns whether some that were passed over are worth a copy by that."""
        spill_first = None if ranking is None else ranking.spill_first
        if spill_first is self._spill_first:
            return False
        self._spill_first = spill_first
        if ranking is None:
            self.worth = None
            return bool(self._passed.any())
        self.worth, blocks = worth_of(ranking), worth_blocks_of(ranking, self._finds)
        self._elsewhere = frozenset(ranking.spill_first[blocks == NOBODY].tolist())
        self._marked = self._none.copy()
        self._marked[blocks] = True
        return bool(self._passed[blocks].any())

    def forget_passed(self) -> None:
        """Note that all blocks will be looked at again."""
        self._passed[:] = False

    def worthy(self, found: FoundBlocks) -> tuple[Sequence[int], Sequence[int]]:
        """Which of ``found`` are worth a copy, and their keys.

        By their numbers first, as advice found them; of those, by what they hold now.
        """
        worth, wanted = self.worth, self.wanted
        if worth is None:
            return range(len(found.blocks)), keys_in_pool(found.hashes)
        marks = self._marked[found.ids]
        for more in filter(None, (wanted, self._elsewhere)):
            asked = map(more.__contains__, keys_in_pool(found.hashes))
            marks |= np.fromiter(asked, np.bool_, len(marks))
        self._passed[found.ids] = ~marks
        places = np.flatnonzero(marks).tolist()
        keys = keys_in_pool([found.hashes[at] for at in places])
        held = [key in worth or key in wanted for key in keys]
        return list(compress(places, held)), list(compress(keys, held))
