"""Which session a request continues where no caller names one: told from its blocks alone."""

from __future__ import annotations

from typing import Final

import numpy as np

from .blocks import BlockTable
from .types import NO_ROW, BlockFlag, Rows

SHARED: Final = -2
"""The owner of a block that several sessions walked: nobody."""


def continued(owners: Rows, reach: Rows) -> int:
    """The session that a prompt continues; ``NO_ROW``: it begins one.

    It continues a session if the deepest block that was seen before was walked by that session
    alone (a system prompt that many share is nobody's), and if it keeps more than half of that
    session's last prompt: histories are edited and cut short.

    Args:
        owners: int32 ``[n]``: who walked each block, from the start of its chain; ``NO_ROW``
            where nobody did, ``SHARED`` where several did.
        reach: int32 ``[sessions]``: full blocks of each session's last prompt.
    """
    unseen = np.flatnonzero(owners == NO_ROW)
    known = int(unseen[0]) if len(unseen) else len(owners)
    session = int(owners[known - 1]) if known else NO_ROW
    if session < 0 or 2 * known <= reach[session]:
        return NO_ROW
    return session


def owners(blocks: BlockTable, rows: Rows) -> Rows:
    """int32 ``[len(rows)]``: the sessions that alone walked each block row; see ``continued``."""
    shared = (blocks.flags[rows] & int(BlockFlag.SHARED)) != 0
    return np.where(shared, np.int32(SHARED), blocks.session[rows])
