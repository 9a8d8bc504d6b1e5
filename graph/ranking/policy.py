"""``Policy``: what decides the order in which an engine loses its blocks.

One object serves the live sidecar and the replay lab. A policy only scores; the rules that bind
every policy (superseded first, protected last, a chain tail first) are laid over its scores by
``rules.lay_rules``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..tables.blocks import Selection
from ..tables.tables import Tables

Scores = npt.NDArray[np.float64]


class Policy(Protocol):
    """Scores blocks from the graph's columns; may learn from them as they change.

    Called under the graph's lock. A policy with a memory learns in ``observe``, from what changed
    in the columns since it last looked; it needs no events of its own.
    """

    @property
    def name(self) -> str:
        """What configuration and replay call it."""

    def observe(self, tables: Tables, engine: int, now: float) -> None:
        """Learn from the columns, once before each ranking of an engine."""

    def scores(self, tables: Tables, engine: int, picked: Selection, now: float) -> Scores:
        """float64 ``[len(picked)]``, higher goes first; changes nothing.

        What is beyond ``rules.SCORE_BOUND`` is cut to it; what is no number counts as the median.

        Args:
            engine: A residency column.
            picked: Rows that this engine holds in some tier.
        """

    def terms(self, tables: Tables, row: int, now: float) -> dict[str, float]:
        """What the score of one block row is made of, for people; changes nothing."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """Who ranks an engine's blocks, for people.

    Attributes:
        policy_rules: Else LRU does.
        ahead: Blocks that the policy found more than LRU, lately; negative where LRU found more.
        changes: How often the rule changed hands.
    """

    policy_rules: bool
    ahead: float
    changes: int


class Referee(Protocol):
    """Says whether a policy may rank, engine by engine; else the engine's own order holds.

    Called under the graph's lock.
    """

    def watch(self, tables: Tables, engine: int, scores: Callable[[Selection], Scores]) -> None:
        """Look at what was found since the last ranking of an engine.

        Args:
            scores: The policy's, under the rules, chains whole, of any rows; higher goes first.
        """

    def trusts(self, engine: int) -> bool:
        """Whether the policy ranks this engine's blocks now."""

    def forget(self, engine: int) -> None:
        """An engine is gone: the next one in its column has shown nothing yet."""

    def rulings(self) -> dict[int, Ruling]:
        """Who rules each engine that is watched, by residency column."""
