"""``HeldRanking``: a ranking as the engine holds it, with what is looked up in it made ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from ...graph.messages.advice import EvictionRanking
from ...graph.types import Keys

NOBODY: Final = 0  # number of vLLM's null block, which never holds a key
Places = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Numbers of blocks in an engine's pool; 0 is its null block, which holds no key."""
Finds = Callable[[Keys], Places]
"""Finds the blocks that hold keys."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldRanking(EvictionRanking):
    """An ``EvictionRanking`` whose marks were made on the client's thread, and not in a step.

    Attributes:
        worth: Keys of ``spill_first``.
        places: Keys of ``protected``, each with its place.
        blocks: That held the keys of ``order`` when it arrived; None where nobody could say.
        worth_blocks: The same of ``spill_first``.
    """

    worth: frozenset[int] = frozenset()
    places: dict[int, int] | None = None
    blocks: Places | None = None
    worth_blocks: Places | None = None

    @classmethod
    def of(cls, ranking: EvictionRanking, finds: Finds | None = None) -> HeldRanking:
        """``ranking``, with its marks."""
        values = {each.name: getattr(ranking, each.name) for each in fields(EvictionRanking)}
        made = cls(**values, worth=worth_of(ranking), places=places_of(ranking))
        if finds is None:
            return made
        blocks, worth_blocks = finds(ranking.order), finds(ranking.spill_first)
        return replace(made, blocks=blocks, worth_blocks=worth_blocks)


def blocks_of(ranking: EvictionRanking) -> Places | None:
    """Numbers of the blocks that hold the keys of its order, if they were found before."""
    return ranking.blocks if isinstance(ranking, HeldRanking) else None


def worth_blocks_of(ranking: EvictionRanking, finds: Finds) -> Places:
    """Numbers of the blocks that are worth a copy before they go."""
    found = ranking.worth_blocks if isinstance(ranking, HeldRanking) else None
    return finds(ranking.spill_first) if found is None else found


def worth_of(ranking: EvictionRanking) -> frozenset[int]:
    """Keys of the blocks that are worth a copy before they go."""
    if isinstance(ranking, HeldRanking):
        return ranking.worth
    return frozenset(ranking.spill_first.tolist())


def places_of(ranking: EvictionRanking) -> dict[int, int]:
    """Places of protected keys, the least precious first."""
    if isinstance(ranking, HeldRanking) and ranking.places is not None:
        return ranking.places
    return {key: place for place, key in enumerate(ranking.protected.tolist())}
