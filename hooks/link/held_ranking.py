"""``HeldRanking``: a ranking as the engine holds it, with what is looked up in it made ready."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...graph.messages.advice import EvictionRanking


@dataclass(frozen=True, slots=True, eq=False)
class HeldRanking(EvictionRanking):
    """An ``EvictionRanking`` whose marks were made on the client's thread, and not in a step.

    Attributes:
        worth: Keys of ``spill_first``.
        places: Keys of ``protected``, each with its place.
    """

    worth: frozenset[int] = frozenset()
    places: dict[int, int] | None = None

    @classmethod
    def of(cls, ranking: EvictionRanking) -> HeldRanking:
        """``ranking``, with its marks."""
        values = {each.name: getattr(ranking, each.name) for each in fields(EvictionRanking)}
        return cls(**values, worth=worth_of(ranking), places=places_of(ranking))


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
